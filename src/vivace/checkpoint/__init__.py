"""Reading and writing Hugging Face directories: configuration, weights, tokenizer, adapters.

The only room that imports transformers, huggingface_hub, safetensors and tokenizers. To add a model family,
write one translator in ``translators.py``, list it in ``families.py`` and, where its tensors are named differently,
add one table to ``names.py``.
"""

"""Hugging Face directories in and out: configuration, weights, tokenizer, adapters.

The only room that imports transformers, huggingface_hub, safetensors and tokenizers. To add a model family:
one translator in ``families.py`` and, where its tensors are named differently, one table in ``names.py``.
"""

"""GGUF, the file format of llama.cpp: writing checkpoints as such files, and reading such files as checkpoints.

Writing: ``written.py`` (a checkpoint), ``file.py`` (the container), ``blocks.py`` (number formats) and
``tokenizer_keys.py``. Reading: ``header.py`` (the container), ``decoding.py`` (number formats), ``configuration.py``
and ``pieces.py`` (``config.json`` and ``tokenizer.json`` out of the metadata), ``tensors.py`` (the weights under the
names of a Hugging Face checkpoint) and ``folder.py`` (a folder that describes the file to everything else).
"""

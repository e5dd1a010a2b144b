"""Safetensors checkpoints that other programs have quantized, told by the ``quantization_config`` of ``config.json``.

Each format has a file: how its tensors are named, what their bits mean, which of its settings are read. ``methods.py``
finds the format of a checkpoint, and ``stored.py`` shows its matrices to the loader under the names, and in the shapes,
that they had before they were quantized.
"""

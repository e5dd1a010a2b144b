"""Drafts by the model itself, with its weights quantized."""

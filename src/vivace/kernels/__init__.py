"""Hot operations on raw tensors: one signature each, chosen once, reported, never switched silently.

``reference`` is plain PyTorch and always works; it is the oracle of every other body. ``native`` runs what
``build`` compiled from ``native/`` for AVX2 or AVX-512; ``choice`` says which of them it is.
"""

"""Hot operations on raw tensors: one signature each, chosen once, reported, never switched silently.

``reference`` is plain PyTorch and always works; it is the oracle of every later body.
"""

"""Decoding on a GPU: the layers of a pass as one recorded graph."""

"""The decoder on native CPU kernels: packed weights, spans of layers and chains of drafts in one call."""

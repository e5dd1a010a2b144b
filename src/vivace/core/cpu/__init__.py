"""The decoder on native CPU kernels: packed weights, several layers in one call, several decoding steps in one call."""

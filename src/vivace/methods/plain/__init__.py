"""Plain decoding: one token a pass."""

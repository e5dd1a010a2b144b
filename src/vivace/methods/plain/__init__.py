"""Plain decoding: one token per pass."""

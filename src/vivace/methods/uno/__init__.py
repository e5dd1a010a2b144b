"""UNO: the model itself, with low-rank deltas, drafts a block of tokens in one pass."""

"""UNO: the model itself, with low-rank terms, drafts a block in one pass."""

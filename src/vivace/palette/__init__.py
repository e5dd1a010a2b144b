"""Weights clustered to a few values: checkpoints rounded to palettes of two to four bits, with the loss that costs."""

"""Prompt lookup: what followed the same words before is the draft."""

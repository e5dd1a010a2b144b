"""Prompt lookup: what followed the same tokens before is the draft."""

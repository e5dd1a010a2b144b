"""Drafts of an early exit: DEED, with an adaptation module, and LayerSkip, without."""

"""Drafts read at an early exit of the model: DEED, with an adaptation module, and LayerSkip, without one."""

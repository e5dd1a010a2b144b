"""Prompts that were read before, on disk: they survive a restart, and every process that may read them shares them."""

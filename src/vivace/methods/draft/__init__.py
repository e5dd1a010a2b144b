"""Speculative decoding with a second, smaller model that drafts."""

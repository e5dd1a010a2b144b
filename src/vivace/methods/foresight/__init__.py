"""Foresight as a method: plain decoding that predicts which experts a mixture will choose.

It drafts nothing. What predicts, and tells the expert cache, is in ``storage/experts/foresight``.
"""

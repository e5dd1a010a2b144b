"""Foresight as a method: plain decoding that predicts which experts a mixture of experts will choose.

It drafts nothing. The predictors, which inform the expert cache, are in ``storage/experts/foresight``.
"""

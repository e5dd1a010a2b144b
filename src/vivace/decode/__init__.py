"""The decoding loop, and what all methods share: verification, drafts from lower layers, prefill, early exits,
failures.

``session.py`` is the loop. ``verify.py`` decides which drafted tokens are kept, and its docstring has the proof that
this is lossless.
"""

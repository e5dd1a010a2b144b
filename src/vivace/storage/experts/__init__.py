"""Experts of a mixture that are not all in memory.

``store.py`` says where experts lie in a file. ``cache.py`` gives a layer the experts that its router chose:
``slots.py`` knows which of them are in memory, ``fetches.py`` which are being read, and ``prefetch.py`` which are
predicted and wait for their turn. ``policy.py`` predicts when each will be used again, which decides about eviction.
``layer.py`` joins the cache to a mixture and ``parts.py`` to a decoder. The folder ``foresight`` predicts which experts
come next.
"""

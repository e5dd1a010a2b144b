"""Ways to read a prompt that leave tokens out: what they are called, how much they keep, and which tokens those are.

``table.py`` lists them, ``schedule.py`` says after which layers how many tokens go on, ``scores.py`` which ones, and
``pruned.py`` reads a prompt that way. How a prompt is read in full is in ``decode/prefill.py``.
"""

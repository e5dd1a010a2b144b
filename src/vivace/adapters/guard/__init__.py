"""A guard: what may not be asked, and what an answer may not say.

``rules.py`` finds what can be spelt out (words, patterns, e-mail addresses, card and account numbers), ``head.py``
judges residuals that the model computes anyway, ``watch.py`` follows a text while it is written, and ``guard.py`` puts
these together and reads them from files. ``untrusted.py`` keeps a text that is only to be worked on apart from
instructions.
"""

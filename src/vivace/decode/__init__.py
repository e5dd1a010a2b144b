"""The only token loop: sequences join and leave between steps; drafting, verifying and stopping happen here.

``session.py`` is the loop, ``verify.py`` decides what is kept and says why that is lossless.
"""

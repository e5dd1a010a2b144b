"""The decoding methods: ``table.py`` lists them, ``composition.py`` makes their drafters for one model.

Each method has a folder whose ``spec.py`` holds what the rest of the package knows about it. Methods do not import one
another.
"""

"""The ways to decode: ``table.py`` lists them, ``composition.py`` puts their drafters together for one model.

What there is to know about a method stands in its spec (``spec.py``), in the folder of the technique.
Techniques do not import one another.
"""

"""Dynamic depth with the accelerated residual (M2R2, arXiv:2502.02040): tokens leave early where it is sure.

``gates.py`` several gates with a residual of their own each, ``router.py`` who decides that a token may leave,
``objective.py`` how both are trained, ``thresholds.py`` how sure is sure enough, ``drafter.py`` decoding with them.
"""

"""Mixture of multi-rate residuals (M2R2, arXiv:2502.02040): an accelerated stream beside the slow one.

``config.py`` what it is, ``residual.py`` the accelerated residual, ``drafter.py`` self-speculation with it,
``objective.py`` how its adapters are trained on the frozen model.

Dynamic depth: ``gates.py`` several gates with a residual of their own each, ``router.py`` who decides that a token may
leave, ``exits.py`` how both are trained, ``thresholds.py`` how sure is sure enough, ``dynamic.py`` decoding with them.
"""

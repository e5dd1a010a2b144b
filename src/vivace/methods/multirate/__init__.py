"""Mixture of multi-rate residuals (M2R2, arXiv:2502.02040): an accelerated stream beside the slow one.

``config.py`` what it is, ``residual.py`` the accelerated residual, ``drafter.py`` self-speculation with it,
``objective.py`` how its adapters are trained on the frozen model.
"""

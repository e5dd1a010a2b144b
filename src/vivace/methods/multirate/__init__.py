"""Self-speculation with an accelerated residual (M2R2, arXiv:2502.02040) that runs beside the model's own.

``config.py`` has its settings, ``residual.py`` the accelerated residual, ``reach.py`` its reading of deep layers,
``drafter.py`` the drafting, and ``objective.py`` the training of its adapters on the frozen model.
"""

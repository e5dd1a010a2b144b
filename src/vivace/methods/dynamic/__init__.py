"""Dynamic depth with accelerated residuals (M2R2, arXiv:2502.02040): tokens exit early where a router is confident.

``gates.py`` has the exit layers and their accelerated residuals, ``router.py`` what decides that a token may exit,
``objective.py`` the training of both, ``thresholds.py`` the calibration of how confident is enough, and ``drafter.py``
the decoding.
"""

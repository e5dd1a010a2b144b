"""Weights larger than memory.

Mixtures of experts: ``experts.py`` slots that are filled on demand and ahead of time, ``policies.py`` what stays and
what comes early, ``experts_guess.py`` guesses from the slow residual, ``experts_parts.py`` a decoder over the slots.
"""

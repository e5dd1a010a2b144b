"""Weights larger than memory.

``store.py`` the file, ``convert.py`` how it is made, ``readers.py`` how it is read, ``budget.py`` what stays,
``loading.py`` a decoder over it. Dense models: ``streaming.py`` matrices ahead of their layer; ``neurons.py`` only the
neurons that are active, in ``neuron_cache.py``, chosen by ``thresholds.py`` or guessed by ``predictors.py``.

Mixtures of experts: ``experts.py`` slots that are filled on demand and ahead of time, ``policies.py`` what stays and
what comes early, ``experts_guess.py`` guesses from the slow residual, ``experts_parts.py`` a decoder over the slots;
``traces.py`` what a run leaves behind, and ``simulator.py`` what it would have taken elsewhere.
"""

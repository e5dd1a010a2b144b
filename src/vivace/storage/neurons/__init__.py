"""Feed-forwards of which only the active neurons are read from the store.

``feed_forward.py`` computes with them and ``loader.py`` reads them into ``cache.py``, which keeps the neurons of the
last few tokens. Which neurons are active is predicted by ``predictors.py``, or known from a matrix that stays in memory
and the ``thresholds.py`` on its result; ``calibration.py`` finds either on texts. ``ordering.py`` lays neurons that are
active together side by side in the file.
"""

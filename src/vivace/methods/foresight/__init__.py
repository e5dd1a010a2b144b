"""Foresight: which experts of a mixture will be needed, known ahead of time, so that they are loaded meanwhile.

``weights.py`` the routers asked early and their training, ``forecast.py`` what the end of a pass says of the next,
``drafter.py`` plain decoding that tells the expert cache.
"""

"""Foresight: predicts which experts a mixture will choose, so that the expert cache can prefetch them.

There are three predictors, which a recipe may combine. ``weights.py`` has an accelerated residual that runs ahead of
the slow one (M2R2) and matrices that teach routers to be asked some layers early; ``forecast.py`` tells the experts of
a whole pass before it begins. ``routers.py`` asks the routers of several layers at once, and ``drafter.py`` decodes
plainly while it predicts: a drafter that proposes nothing. ``objective.py`` trains all three on a frozen model.
"""

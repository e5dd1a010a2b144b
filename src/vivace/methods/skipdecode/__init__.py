"""SkipDecode (Del Corro et al. 2023, arXiv:2307.02628): the position of a token decides which middle
layers it skips.
"""

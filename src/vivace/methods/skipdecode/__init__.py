"""SkipDecode (Del Corro et al. 2023, arXiv:2307.02628): middle layers are skipped by position."""

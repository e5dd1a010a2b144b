"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): a Jacobi iteration collects n-grams, which are the drafts."""

"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): Jacobi windows fill an n-gram pool."""

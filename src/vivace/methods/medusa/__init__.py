"""Medusa (Cai et al. 2024, arXiv:2401.10774): further heads on the final residual draft a tree."""

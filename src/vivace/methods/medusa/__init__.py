"""Medusa (Cai et al. 2024, arXiv:2401.10774): heads on the last residual draft a tree."""

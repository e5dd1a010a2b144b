"""Mixture-of-Depths (Raposo et al. 2024, arXiv:2404.02258): routers let only some tokens pass every second layer."""

"""EAGLE (Li et al. 2024, arXiv:2401.15077): a one-layer decoder drafts by predicting the next final residual."""

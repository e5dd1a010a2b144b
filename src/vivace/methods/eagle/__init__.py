"""EAGLE (Li et al. 2024, arXiv:2401.15077): one layer that guesses the next feature drafts."""

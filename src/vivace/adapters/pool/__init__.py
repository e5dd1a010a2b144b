"""Soft prompts chosen for each request: a pool of them, of which the first layer says which one a prompt reads most.

After inference-time dynamic prompting: Hoang et al. 2023, arXiv:2310.00867. ``pool.py`` holds the members and what the
model computes of each, ``choice.py`` scores them for a prompt, ``training.py`` learns one.
"""

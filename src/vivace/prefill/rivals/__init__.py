"""Ways of others to leave out tokens of a prompt, on the seams of ours (``pruned.py``), so that they can be compared.

Each is written from its paper and changes as little as it can: what a schedule is, how pieces run between decoding
steps, what drafts read, and how entries are stored is the same for all.
"""

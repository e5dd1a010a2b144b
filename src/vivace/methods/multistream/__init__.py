"""Speculative Streaming: one model drafts and verifies in the same pass.

Bhendawade, Belousova, Fu, Mason, Rastegari, Najibi 2024, arXiv:2402.11131; with A. Lin, EMNLP 2025. ``streams.py`` has
the mathematics, ``forward.py`` the pass, and ``drafter.py`` the drafts.
"""

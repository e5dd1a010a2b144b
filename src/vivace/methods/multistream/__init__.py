"""Speculative Streaming: one model drafts and verifies in the same pass.

Bhendawade, Belousova, Fu, Mason, Rastegari, Najibi 2024, arXiv:2402.11131; with A. Lin, EMNLP 2025.
Read ``streams.py`` for the mathematics, ``forward.py`` for the pass, ``drafter.py`` for what it drafts.
"""

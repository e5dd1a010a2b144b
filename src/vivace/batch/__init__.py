"""Answers a whole file of prompts: sorted by length inside, in the order of the file outside, and resumable.

The main process decodes. Tokenizing and turning tokens back into text are done in processes beside it, which get
bounded pieces of work. Every answer is appended to a journal as soon as it is there; when all are, the output file is
written from the journal in one piece.
"""

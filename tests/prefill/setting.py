"""The model's depth, the long prompt and the options that tests of prefills share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from vivace.decode.session import Session

LAYERS = 6
PROMPT = [1 + (11 * place + place // 7) % 290 for place in range(301)]
GREEDY: dict[str, Any] = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 12, "logprobs": True}
KINDS = [("torch", "float32"), ("torch", "bfloat16"), ("auto", "bfloat16"), ("auto", "float32")]
"""Kernels and dtypes."""


def written(session: Session, ids: Iterable[int], *, cancelled: int) -> dict[int, list[int]]:
    """Tokens of each request once a session is idle; one of them is cancelled after three steps."""
    tokens: dict[int, list[int]] = {number: [] for number in ids}
    for steps in count(1):
        if session.is_idle:
            break
        for emitted in session.step():
            assert emitted.error is None
            tokens[emitted.request_id] += emitted.tokens
        if steps == 3:
            session.cancel(cancelled)
    return tokens

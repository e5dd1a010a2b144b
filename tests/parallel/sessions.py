"""What a session leaves of a long prompt, and what it writes behind it."""

from __future__ import annotations

from typing import Any

import torch

from vivace.decode.session import Session


def entries_and_texts(session: Session, length: int, num_requests: int) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """Entries of the first request's prompt of so many tokens once its first token is there, as far as later ones read
    them, keys and values of every layer; and the texts of all requests by their numbers.
    """
    texts: dict[int, list[int]] = {number: [] for number in range(num_requests)}
    while not texts[0]:
        for one in session.step():
            texts[one.request_id] += one.tokens
    slot = next(s.slot for s in session._live.values() if s.id == 0)
    entries, config = [], session.model.config
    for layer in range(config.num_layers):
        window = config.window(layer)
        start = 0 if window is None else max(0, length - window)
        entries += [part.clone() for part in session.cache.span(layer, slot, start, length - 1)]
    for one in session.drain():
        texts[one.request_id] += one.tokens
    return entries, texts

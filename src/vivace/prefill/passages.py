"""Dividing a prompt into passages, which go on or are pruned as a whole.

An answer needs a sentence together with the title above it and the words around it. So the scores that are learnt are
those of passages: a line of the text each, where short lines go with the next one and long ones are divided. A prompt
is written as the lengths of its parts: the opening, whose first tokens all heads lean on, then the passages, then the
window at the end. The question is in the window, or else in the opening. The first and the last part always go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import ceil

import torch
from torch import Tensor

from vivace.prefill.scores import SINKS

SHORTEST = 32
"""Lines of fewer tokens belong to the passage of the next line."""
LONGEST = 256
"""Lines of more tokens are divided into equal passages of at most ``PART``."""
PART = 128


def divide(tokens: Sequence[int], breaks: Collection[int], window: int, opening: int = 0) -> tuple[int, ...]:
    """Return the lengths of a prompt's parts: opening, passages, window.

    Args:
        tokens: of the prompt.
        breaks: tokens that end a line.
        window: tokens at the end that are no passage.
        opening: tokens at the beginning that are none; those up to ``SINKS`` never are.
    """
    last = max(0, len(tokens) - window)
    first = min(max(SINKS, opening), last)
    ends = [place + 1 for place in range(first, last - 1) if tokens[place] in breaks]
    edges = [first]
    for end in (*ends, last):
        start, size = edges[-1], end - edges[-1]
        if size and (size >= SHORTEST or end == last):
            count = 1 if size <= LONGEST else ceil(size / PART)
            edges += [start + size * part // count for part in range(1, count + 1)]
    passages = [stop - start for start, stop in pairwise(edges)]
    return (first, *passages, len(tokens) - last)


def largest(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the largest value of each passage, (n, ...) -> (P, ...)."""
    parts = values.split(list(lengths))[1:-1]
    return torch.stack([part.amax(0) for part in parts]) if parts else values[:0]


def sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum over each passage, (n,) -> (P,)."""
    return torch.stack([part.sum() for part in values.split(list(lengths))[1:-1]])


def by_passages(scores: Tensor, lengths: Sequence[int], count: int) -> Tensor:
    """Keep the first part, the window, and the passages between them that have the best scores.

    A passage that does not fit as a whole is kept in part, from its beginning. One of less than ``SHORTEST`` tokens in
    front of the window comes first, whatever its score: it is the beginning of the line that the window cuts, such as
    the first words of a long question.

    Args:
        scores: of each passage, (P,); ties go to earlier ones.
        lengths: of the parts, as ``divide`` gives them.
        count: how many tokens go on; where the window alone is more, its last ones.

    Returns:
        (count,) places in rising order.
    """
    length = sum(lengths)
    window = min(lengths[-1], count)
    sinks = min(lengths[0], count - window)
    firsts = list(accumulate(lengths))
    kept = list(range(sinks))
    order = torch.sort(scores, descending=True, stable=True).indices.tolist()
    if order and lengths[-2] < SHORTEST:
        order.remove(len(order) - 1)
        order.insert(0, len(scores) - 1)
    for passage in order:
        room = count - window - len(kept)
        if not room:
            break
        kept += range(firsts[passage], firsts[passage] + min(room, lengths[passage + 1]))
    return torch.tensor([*sorted(kept), *range(length - window, length)], device=scores.device)

"""Draws a token as the largest of logit / temperature + noise; the noise depends on seed, position and token only.

If ``g`` are independent numbers with Gumbel's distribution, ``argmax_v (l_v / T + g_v)`` has the distribution
``softmax(l / T)`` (Gumbel 1954; Yellott 1977); among the tokens that top-p keeps it has the truncated one. A sampled
text is then the greedy text of perturbed logits, which makes drafts for it simple and good:

* *Verification* compares tokens, as it does for a greedy text, and the text of a seed is the same whatever was drafted,
  in whatever batch, and in however many steps of one native call.
* *Drafting* perturbs the drafter's logits with the same noise. Then a guess is the target's token with a probability of
  at least ``(1 - d) / (1 + d)``, where ``d`` is the total variation distance of the two distributions. (Daliri, Musco
  and Suresh 2024, arXiv:2408.07978, have this coupling and its bound for speculative decoding.) The likeliest token of
  the drafter, in contrast, is the target's token only with that token's probability.

The text is distributed as samples of the target: the noise at a position is independent of the noise at all others, the
logits there depend on tokens before it only, and which guesses were made changes neither.

The noise comes from Threefry-2x32 with twenty rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3"), keyed by the seed and counted by pair of tokens and position: no state is saved, restored or shared. This file is
what ``kernels/native/draw.h`` computes, as an oracle; decoding runs that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURES = (0.01, 100.0)
"""Temperatures at which scores stay far from the ends of float32; texts with others are sampled in another way."""
_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


class Drawing(NamedTuple):
    """How the tokens of one text are drawn."""

    key: int
    """Key of its noise: the seed."""
    temperature: float
    """What logits are divided by, within ``TEMPERATURES``."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probability reaches p may be drawn; of equally likely ones the first."""


def threefry(key: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two words of random bits for each pair of counters, all of them int64 tensors below 2^32."""
    keys = [key & _WORD, (key >> 32) & _WORD]
    keys.append(keys[0] ^ keys[1] ^ _PARITY)
    x, y = (first + keys[0]) & _WORD, (second + keys[1]) & _WORD
    for block in range(5):
        for by in _ROTATIONS[block % 2]:
            x = (x + y) & _WORD
            y = ((y << by) & _WORD | y >> (32 - by)) ^ x
        x = (x + keys[(block + 1) % 3]) & _WORD
        y = (y + keys[(block + 2) % 3] + block + 1) & _WORD
    return x, y


def gumbels(key: int, position: int, tokens: Tensor) -> Tensor:
    """Return the noise of tokens (n,) int64 at a position of a text, (n,) float64."""
    pairs = tokens // 2
    first, second = threefry(key, pairs, torch.full_like(pairs, position & _WORD))
    bits = torch.where(tokens % 2 == 0, first, second) >> 1
    u = (bits.clamp(max=0x7FFFFF80).double() + 0.5) / 2.0**31
    return -torch.log(-torch.log1p(-u))


def drawn(logits: Tensor, drawing: Drawing, position: int, tokens: Tensor | None = None) -> int | None:
    """Return the index that is drawn from logits (n,), or None where every one is excluded.

    Args:
        logits: (n,) scores of the next token.
        drawing: how it is drawn.
        position: index of the next token in its text.
        tokens: (n,) which token each logit belongs to; None: all, in order.
    """
    tokens = torch.arange(len(logits)) if tokens is None else tokens
    scaled = logits.double() / drawing.temperature
    scores = scaled + gumbels(drawing.key, position, tokens)
    if drawing.top_p < 1:
        ordered, order = torch.softmax(scaled, 0).sort(descending=True, stable=True)
        kept = order[: max(1, int((ordered.cumsum(0) - ordered < drawing.top_p).sum()))]
        scores = torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept])
    best = int(scores.argmax())
    return best if bool(scores[best] > -torch.inf) else None

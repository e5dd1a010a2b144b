"""Which tokens of a prompt go on.

Every function returns places in rising order, the last token's among them, and is the same for the same arguments.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

BLOCK = 32
"""Tokens that ``by_words`` and ``by_masses`` keep or prune together."""
SINKS = 4
"""First tokens of a prompt that ``by_masses`` keeps, since all heads lean on them."""
QUESTION = 64
"""Tokens at the end of a prompt with whose words blocks are compared; they go on themselves."""
K1, B = 1.2, 0.75
"""Constants of BM25 (Robertson & Zaragoza 2009), as they are usually set."""


def by_attention(weights: Tensor, count: int) -> Tensor:
    """Keep the tokens that the last one reads with most weight (eq. 1 of arXiv:2407.14057).

    Args:
        weights: (H, n) with which each head of the last token reads every token, itself included.
        count: how many go on; ties go to earlier tokens.

    Returns:
        (count,) places.
    """
    scores = weights.float().mean(0)
    scores[-1] = torch.inf
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


def by_masses(masses: Tensor, count: int, window: int) -> Tensor:
    """Keep the first tokens, the window at the end, and the blocks between them that have most mass.

    A block that does not fit as a whole is kept in part, from its beginning.

    Args:
        masses: (n,) score of each token, above 0.
        count: how many go on; where the window alone is more, its last ones.
        window: tokens at the end that go on.
    """
    length = len(masses)
    end = min(window, count)
    sinks = min(SINKS, count - end, length - end)
    middle = masses[sinks : length - end].float()
    padded = torch.nn.functional.pad(middle, (0, -len(middle) % BLOCK))
    order = torch.sort(padded.view(-1, BLOCK).sum(1), descending=True, stable=True).indices
    places = (order[:, None] * BLOCK + torch.arange(BLOCK, device=masses.device)).flatten()
    chosen = places[places < len(middle)][: count - end - sinks] + sinks
    ends = torch.arange(length - end, length, device=masses.device)
    return torch.cat((torch.arange(sinks, device=masses.device), chosen.sort().values, ends))


def smoothed(masses: Tensor, width: int) -> Tensor:
    """Return masses (n,) averaged over ``width`` neighbours, an odd number; beyond the ends are zeros."""
    padded = torch.nn.functional.pad(masses.float(), (width // 2, width // 2))
    return padded.unfold(0, width, 1).mean(-1)


def best(masses: Tensor, count: int, window: int) -> Tensor:
    """Keep the last tokens, ``window`` of them, and those in front of them with the largest masses (n,).

    Args:
        masses: of each token.
        count: how many go on; ties go to earlier tokens.
        window: tokens at the end that go on.
    """
    scores = masses.float().clone()
    scores[max(0, len(scores) - min(window, count)) :] = torch.inf
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


def at_random(tokens: Sequence[int], count: int) -> Tensor:
    """Keep tokens that are drawn, by a seed that the prompt gives, and the last one."""
    generator = torch.Generator().manual_seed(zlib.crc32(array("q", tokens).tobytes()))
    drawn = torch.randperm(len(tokens) - 1, generator=generator)[: count - 1]
    return torch.cat((drawn.sort().values, torch.tensor([len(tokens) - 1])))


def by_words(tokens: Sequence[int], count: int) -> Tensor:
    """Keep the end of a prompt, and the blocks in front of it that have most in common with it (BM25 over tokens).

    A block that does not fit as a whole is kept in part, from its beginning.
    """
    end = min(QUESTION, count)
    front = list(tokens[: len(tokens) - end])
    blocks = [front[start : start + BLOCK] for start in range(0, len(front), BLOCK)]
    counts = [Counter(block) for block in blocks]
    mean = sum(map(len, blocks)) / max(1, len(blocks))
    scores = [0.0] * len(blocks)
    for word in set(tokens[len(tokens) - end :]):
        having = sum(word in each for each in counts)
        weight = log(1 + (len(blocks) - having + 0.5) / (having + 0.5))
        for place, each in enumerate(counts):
            if each[word]:
                norm = K1 * (1 - B + B * len(blocks[place]) / mean)
                scores[place] += weight * each[word] * (K1 + 1) / (each[word] + norm)
    kept: list[int] = list(range(len(front), len(tokens)))
    for place in sorted(range(len(blocks)), key=lambda at: (-scores[at], at)):
        first = place * BLOCK
        kept += range(first, first + min(len(blocks[place]), count - len(kept)))
        if len(kept) == count:
            break
    return torch.tensor(sorted(kept))

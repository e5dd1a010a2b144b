"""Branches below many positions of a text at once, for training: ``Step.branched`` without a cache, with gradients.

A branch is a chain of rows that hangs from a position: it reads the text up to there and itself, and no other branch.
Its attention is one softmax over the text's keys and its own. Scores of the two parts stand side by side, so the
block-diagonal part is (count, count) a position and no mask over all pairs of rows is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step


@dataclass(frozen=True)
class Places:
    """Positions that carry a branch: (B, P) and which of them are not padding, n in all."""

    position: Tensor
    real: Tensor


def places_of(scored: Tensor, rows: int) -> Iterator[Places]:
    """Positions whose next token is scored, from the left in every text, at most about ``rows`` at a time."""
    predicting = F.pad(scored[:, 1:], (0, 1))
    order = predicting.int().argsort(dim=1, descending=True, stable=True)
    longest = int(predicting.sum(1).max())
    width = max(1, rows // len(scored))
    for first in range(0, longest, width):
        position = order[:, first : min(first + width, longest)]
        yield Places(position, predicting.gather(1, position))


@dataclass(frozen=True)
class Heard:
    """Whose law each row of the branches shall give: row j = 1..count of a position t stands at t + j."""

    scored: Tensor
    """(n, count) bool: the token after it is one to learn."""
    text: Tensor
    """(m,) batch element of the rows that are scored, row by row."""
    position: Tensor
    """(m,) where they stand."""
    level: Tensor
    """(m,) j - 1."""

    @staticmethod
    def of(places: Places, count: int, scored: Tensor) -> Heard:
        """For branches of ``count`` rows in a batch whose tokens are ``scored`` (B, T)."""
        length = scored.shape[1]
        text = places.real.nonzero()[:, :1].expand(-1, count)
        position = places.position[places.real][:, None] + torch.arange(1, count + 1)
        inside = position.clamp(max=length - 2)
        learnt = scored[text, inside + 1] & (position < length - 1)
        level = torch.arange(count).expand_as(position)
        return Heard(learnt, text[learnt], position[learnt], level[learnt])

    def agreement(self, guess: Tensor, truth: Tensor, total: int, name: str) -> dict[str, float]:
        """Share of ``total`` positions at which each row names the model's choice, and guesses a chain of them keeps.

        Args:
            guess: (m, V) of the rows that are scored.
            truth: (m, V) the model's.
            total: positions of the batch.
            name: what a row is called.
        """
        right = torch.zeros(self.scored.shape)
        right[self.scored] = (guess.argmax(-1) == truth.argmax(-1)).float()
        seen = {f"{name} {place + 1}": float(share) for place, share in enumerate(right.sum(0) / total)}
        return {**seen, "kept": float(right.cumprod(-1).sum()) / total}


def branch_call(places: Places, count: int, terms: Callable[[Tensor], LowRankDeltas]) -> Step:
    """The call of branches of ``count`` rows, all of which carry the terms that are given for ``which`` (T,)."""
    stands = (places.position[places.real][:, None] + torch.arange(1, count + 1)).reshape(-1)
    rows = len(stands)
    which = torch.zeros(rows, dtype=torch.int64)
    return Step(_OwnRows(), which, stands, stands, stands + 1, None, rows, rows, deltas=(terms(which),))


def run_branches(model: Decoder, h: Tensor, call: Step, text: Step, places: Places, start: int = 0) -> Tensor:
    """Branches through layers start..L-1.

    Args:
        model: the frozen decoder.
        h: (n * count, E) rows entering layer ``start``, branch by branch.
        call: theirs, from ``branch_call``.
        text: the dense call that holds the text's keys and values.
        places: where they hang.
        start: first layer.

    Returns:
        (n, count, E) before the final norm.
    """
    config, own = model.config, call.memory
    position, real = places.position, places.real
    rows, count = len(h), len(h) // int(real.sum())
    assert isinstance(own, _OwnRows), "a call of branches keeps their own keys and values"
    assert text.grid is not None, "branches hang from a dense call"
    windows = {config.window(index) for index in range(start, config.num_layers)}
    masks = {window: branch_mask(position, count, text.grid[1], window) for window in windows}

    def spread(heads: Tensor) -> Tensor:
        """(n * count, heads, D) -> (B, P, count, heads, D), zeros where nothing is real."""
        wide = heads.new_zeros(*real.shape, count, *heads.shape[1:])
        wide[real] = heads.view(-1, count, *heads.shape[1:])
        return wide

    for index in range(start, config.num_layers):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        q = layer.project(h, call)
        heads = Heads(spread(q), spread(own.keys), spread(own.values))
        stored, mask = text.memory.stored(index), masks[config.window(index)]
        read = attend_branches(heads, stored, mask, scale=config.scale, softcap=config.attention_softcap)
        h = layer.feed(layer.output(h, read[real].reshape(rows, -1, config.head_dim), call), call)
    return h.view(-1, count, h.shape[1])


class _OwnRows:
    """Fills ``Memory`` for one layer's projections: keeps what branches would store, for themselves alone."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values (n, K, D)."""
        self.keys, self.values = keys, values

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """What was put last."""
        return self.keys, self.values


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of branches as a layer projects them."""

    q: Tensor
    """(B, P, count, H, D)"""
    k: Tensor
    """(B, P, count, K, D)"""
    v: Tensor
    """As k."""


def attend_branches(
    own: Heads, main: tuple[Tensor, Tensor], mask: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of branches to the text and to their own rows.

    Args:
        own: of P positions in each batch element.
        main: keys and values of the text, each (B, K, T, D).
        mask: what ``branch_mask`` gives.
        scale: factor on q.k.
        softcap: ``c * tanh(score / c)`` when set.

    Returns:
        (B, P, count, H, D).
    """
    batch, places, count, heads, width = own.q.shape
    keys, values = main
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    q = own.q.view(batch, places, count, kv_heads, group, width).permute(0, 3, 4, 1, 2, 5)
    far = (q.reshape(batch, kv_heads, -1, width) @ keys.mT).view(batch, kv_heads, group, places, count, length)
    near = torch.einsum("bkgpiw,bpjkw->bkgpij", q, own.k)
    scores = torch.cat((far, near), -1).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + mask, -1).to(values.dtype)
    far, near = weights[..., :length], weights[..., length:]
    read = (far.reshape(batch, kv_heads, -1, length) @ values).view(batch, kv_heads, group, places, count, width)
    read = read + torch.einsum("bkgpij,bpjkw->bkgpiw", near, own.v)
    return read.permute(0, 3, 4, 1, 2, 5).reshape(batch, places, count, heads, width)


def branch_mask(position: Tensor, count: int, length: int, window: int | None) -> Tensor:
    """The text's keys ``<= position`` and rows of the branch up to the one that reads.

    Args:
        position: (B, P) of the rows that branches hang from.
        count: rows of each.
        length: T.
        window: a row reads only the last this many tokens before it, itself included.

    Returns:
        Additive, (B, 1, 1, P, count, T + count) float32.
    """
    ahead = torch.arange(1, count + 1)
    stands = position[..., None, None] + ahead[:, None]
    main = torch.arange(length).expand(*position.shape, count, length)
    own = position[..., None, None] + ahead.expand(count, count)
    hidden = torch.cat((main > position[..., None, None], own > stands), -1)
    if window is not None:
        hidden |= torch.cat((main, own), -1) <= stands - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return mask[:, None, None]

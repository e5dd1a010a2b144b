"""Chains of rows below many positions of a text at once, for training: ``Step.branched`` with gradients and no cache.

A branch is a chain of rows that continues the text after one position. Its rows read the text up to that position and
the earlier rows of the same branch, and no other branch. Attention is one softmax over the text's keys and the branch's
own. The scores of the two parts are computed separately and concatenated, so that the part within branches takes
(count, count) numbers for each position instead of a mask over all pairs of rows.
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
    """Positions of a batch that have a branch."""

    position: Tensor
    """(B, P) positions, padded."""
    real: Tensor
    """(B, P) bool: False where ``position`` is padding; n of them are True."""


def places_of(scored: Tensor, rows: int) -> Iterator[Places]:
    """Yield the positions whose next token is scored, from left to right in every text, about ``rows`` at a time."""
    predicting = F.pad(scored[:, 1:], (0, 1))
    order = predicting.int().argsort(dim=1, descending=True, stable=True)
    longest = int(predicting.sum(1).max())
    width = max(1, rows // len(scored))
    for first in range(0, longest, width):
        position = order[:, first : min(first + width, longest)]
        yield Places(position, predicting.gather(1, position))


@dataclass(frozen=True)
class Heard:
    """Which rows of branches are trained: row j = 1..count of a position t predicts the token at t + j + 1."""

    scored: Tensor
    """(n, count) bool: whether the token after the row is scored; m are."""
    text: Tensor
    """(m,) batch element of each scored row, in the order of ``scored``."""
    position: Tensor
    """(m,) position of each scored row in its text, t + j."""
    level: Tensor
    """(m,) place of each scored row in its branch, j - 1."""

    @staticmethod
    def of(places: Places, count: int, scored: Tensor) -> Heard:
        """Find the scored rows of branches with ``count`` rows in a batch whose scored tokens are ``scored`` (B, T)."""
        length = scored.shape[1]
        text = places.real.nonzero()[:, :1].expand(-1, count)
        ahead = torch.arange(1, count + 1, device=scored.device)
        position = places.position[places.real][:, None] + ahead
        inside = position.clamp(max=length - 2)
        learnt = scored[text, inside + 1] & (position < length - 1)
        level = (ahead - 1).expand_as(position)
        return Heard(learnt, text[learnt], position[learnt], level[learnt])

    def agreement(self, guess: Tensor, truth: Tensor, total: int, name: str) -> dict[str, float]:
        """Return, for reports, how often each row's guess is the model's choice, and the mean accepted length.

        Args:
            guess: (m, V) logits of the scored rows.
            truth: (m, V) logits of the model.
            total: number of positions of the batch, by which sums are divided.
            name: name of a row in reports, followed by its number j.

        Returns:
            The share of positions for each row, and under "kept" the mean number of guesses before the first wrong one.
        """
        right = torch.zeros(self.scored.shape, device=self.scored.device)
        right[self.scored] = (guess.argmax(-1) == truth.argmax(-1)).float()
        seen = {f"{name} {place + 1}": float(share) for place, share in enumerate(right.sum(0) / total)}
        return {**seen, "kept": float(right.cumprod(-1).sum()) / total}


def branch_call(places: Places, count: int, terms: Callable[[Tensor], LowRankDeltas]) -> Step:
    """Make the call of branches of ``count`` rows, with the low-rank deltas that ``terms`` returns for (T,)."""
    at = places.position[places.real]
    stands = (at[:, None] + torch.arange(1, count + 1, device=at.device)).reshape(-1)
    rows = len(stands)
    which = torch.zeros_like(stands)
    return Step(_OwnRows(), which, stands, stands, stands + 1, None, rows, rows, deltas=(terms(which),))


def run_branches(model: Decoder, h: Tensor, call: Step, text: Step, places: Places, start: int = 0) -> Tensor:
    """Run branches through layers start..L-1.

    Args:
        model: the frozen decoder.
        h: (n * count, E) rows entering layer ``start``, branch by branch.
        call: the call of these rows, from ``branch_call``.
        text: the dense call whose memory holds the text's keys and values.
        places: positions that the branches continue.
        start: first layer.

    Returns:
        Residuals (n, count, E) before the final norm.
    """
    config, own = model.config, call.memory
    position, real = places.position, places.real
    rows, count = len(h), len(h) // int(real.sum())
    assert isinstance(own, _OwnRows), "a call of branches keeps their own keys and values"
    assert text.grid is not None, "branches hang from a dense call"
    windows = {config.window(index) for index in range(start, config.num_layers)}
    masks = {window: branch_mask(position, count, text.grid[1], window) for window in windows}

    def spread(heads: Tensor) -> Tensor:
        """Arrange rows by position, (n * count, heads, D) -> (B, P, count, heads, D), zeros at padding."""
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
    """A ``Memory`` that keeps the branches' own keys and values of one layer."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values (n, K, D) of a layer."""
        self.keys, self.values = keys, values

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that were put last."""
        return self.keys, self.values


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of branches in one layer."""

    q: Tensor
    """(B, P, count, H, D) queries."""
    k: Tensor
    """(B, P, count, K, D) keys."""
    v: Tensor
    """(B, P, count, K, D) values."""


def attend_branches(
    own: Heads, main: tuple[Tensor, Tensor], mask: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Return the attention of branches to the text and to their own rows.

    Args:
        own: queries, keys and values of the branches at P positions in each batch element.
        main: keys and values of the text, each (B, K, T, D).
        mask: additive mask from ``branch_mask``.
        scale: factor on q.k.
        softcap: scores become ``c * tanh(score / c)`` when set.

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
    """Return the mask by which a row reads the text up to its branch's position, and its branch up to itself.

    Args:
        position: (B, P) positions that the branches continue.
        count: number of rows of a branch.
        length: T, the number of tokens of a text.
        window: a row reads only this many tokens, up to and including itself; None for all.

    Returns:
        Additive mask, (B, 1, 1, P, count, T + count) float32.
    """
    ahead = torch.arange(1, count + 1, device=position.device)
    stands = position[..., None, None] + ahead[:, None]
    main = torch.arange(length, device=position.device).expand(*position.shape, count, length)
    own = position[..., None, None] + ahead.expand(count, count)
    hidden = torch.cat((main > position[..., None, None], own > stands), -1)
    if window is not None:
        hidden |= torch.cat((main, own), -1) <= stands - window
    mask = torch.zeros(hidden.shape, device=position.device).masked_fill_(hidden, -math.inf)
    return mask[:, None, None]

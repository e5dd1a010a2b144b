"""Decoding after a pruned prompt, where tokens that were pruned may come back (LazyLLM, arXiv:2407.14057, section 3.3).

In every step tokens are chosen anew. The new token reads everything in the layers below the first pruning point. What
it reads in the last of these layers, of all tokens that have entries there, says which of them the layers behind the
point see; of those the next point chooses again, and so on. A chosen token that has entries behind the point is read.
One that has none comes back: its residual was kept where it was pruned (``KVCache.pending``, the paper's auxiliary
cache), and it passes the layers from there to the next point beside the new token, in one call.

So every token waits in front of one pruning layer at most, has entries in all layers below it and in none behind it,
and is computed once in a layer at most, whenever that is. Entries lie at their positions in the text, in every layer;
rows read them through ``Step.index``.

The last token of the prompt has passed all layers but those behind the last point when the prompt is read, since it
decides what is pruned. The first step takes it up there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.prefill.schedule import PrunePoint
from vivace.prefill.scores import by_attention

PIECE = 64
"""Most rows of a call; tokens that come back are computed so many at a time."""

Choose = Callable[[Tensor, int], Tensor]
"""(weights (H, n) with which the new token reads n tokens, itself the last; how many to keep) -> their places."""


class ReturningDrafter(NoDrafts):
    """Plain decoding in which pruned tokens may come back."""

    def __init__(self, width_bytes: int, traversal: ReturningPass) -> None:
        """Decode with ``traversal``; a residual has ``width_bytes`` bytes."""
        super().__init__("plain", traversal)
        self._width_bytes = width_bytes

    def text_bytes(self, entries: int) -> int:
        """Return the bytes of the residuals that are kept when every token waits."""
        return entries * self._width_bytes


@dataclass
class _Text:
    """A sequence during one step."""

    slot: int
    position: int
    """Of the new token."""
    alive: Tensor
    """Positions that the present layers see, in rising order, the new token's last."""
    rows: Tensor
    """Positions of the tokens that are computed in the present layers, in rising order, the new token's last."""
    hidden: Tensor
    """(n, E) residuals that enter the present layers."""
    back: list[int]
    """How many tokens of the prompt are computed behind each point."""


class ReturningPass:
    """Implements ``Traversal``: one new token for each slot, and those that come back for it."""

    def __init__(self, points: Sequence[PrunePoint], choose: Choose = by_attention) -> None:
        """Prune at these points while decoding; ``choose`` says which tokens go on."""
        self.points = tuple(points)
        self._choose = choose

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run the rows of a draft without guesses."""
        assert not chunk, "prompts are read by their prefill"
        assert draft.committed == (1,) * len(draft.slots) == (1,) * len(draft.tokens), "one new token for each slot"
        edges = [0, *(point.layer for point in self.points), model.config.num_layers]
        embedded = model.embed(draft.tokens, Step.of(draft, cache))
        texts, waiting = list[_Text](), dict[int, list[_Text]]()
        for slot, row in zip(draft.lists.slot, embedded, strict=True):
            text = self._begun(slot, cache, row[None])
            texts.append(text)
            first = next((at for at in cache.pending[slot].layers if self._waits(cache, text, at)), 0)
            waiting.setdefault(first, []).append(text)
        present: list[_Text] = []
        for place, (start, stop) in enumerate(pairwise(edges)):
            for text in present:
                self._take_up(text, cache, place)
            for text in waiting.get(start, []):
                self._enter(text, cache, start)
                present.append(text)
            scores = self._pass(model, cache, present, start, stop)
            if place < len(self.points):
                for text, weights in zip(present, scores, strict=True):
                    self._prune(text, cache, self.points[place], weights)
        hidden = torch.cat([text.hidden[-1:] for text in texts])
        back = {text.slot: tuple(text.back) for text in texts}
        return TargetPass(hidden, torch.arange(len(texts)), came_back=back)

    def _begun(self, slot: int, cache: KVCache, row: Tensor) -> _Text:
        """Return a sequence whose new token is embedded."""
        position = cache.lengths[slot]
        new = torch.tensor([position])
        return _Text(slot, position, torch.arange(position + 1), new, row, [0] * len(self.points))

    @staticmethod
    def _waits(cache: KVCache, text: _Text, layer: int) -> bool:
        """Return whether the new token is a prompt's last one, which has passed the layers below this one."""
        return bool((cache.pending[text.slot].at(layer) == text.position).any())

    @staticmethod
    def _enter(text: _Text, cache: KVCache, start: int) -> None:
        """Let the new token enter its first layers; a prompt's last one reads there what was kept for it."""
        if start:
            pending = cache.pending[text.slot]
            text.rows, text.hidden = pending.take(start, text.rows)
            text.alive = text.alive[~torch.isin(text.alive, pending.missing(start))]

    def _take_up(self, text: _Text, cache: KVCache, place: int) -> None:
        """Take up tokens that the layers behind the last point see now and have no entries of."""
        pending, layer = cache.pending[text.slot], self.points[place - 1].layer
        if layer in pending.layers:
            positions, hidden = pending.take(layer, text.alive)
            text.rows, order = torch.cat((text.rows, positions)).sort()
            text.hidden = torch.cat((text.hidden, hidden))[order.to(hidden.device)]
        text.back[place - 1] = len(text.rows) - 1

    def _pass(self, model: Decoder, cache: KVCache, texts: Sequence[_Text], start: int, stop: int) -> list[Tensor]:
        """Run the rows of all sequences through layers start..stop-1, and set what leaves them.

        Returns:
            For each sequence, with which weights (H, n) its new token reads the n tokens in the last of these layers;
            empty behind the last point.
        """
        if not texts:
            return []
        for text in texts:
            missing = cache.pending[text.slot].missing(start)
            assert not torch.isin(text.alive, missing).any(), "what is seen is stored, or computed now"
        slots = [text.slot for text in texts for _ in range(len(text.rows))]
        positions = [position for text in texts for position in text.rows.tolist()]
        readable = {text.slot: text.alive for text in texts}
        sees_all = all(len(text.alive) == text.position + 1 for text in texts)
        step = Step.at(cache, slots, positions, readable=None if sees_all else readable)
        h, scored = torch.cat([text.hidden for text in texts]), stop < model.config.num_layers
        below, out = list[Tensor](), list[Tensor]()
        for first in range(0, len(h), PIECE):
            every = torch.arange(first, min(first + PIECE, len(h)), device=step.device)
            piece = step if len(h) <= PIECE else step.take(every)
            rows = h[first : first + PIECE]
            if scored:
                below.append(model.run(rows, piece, start, stop - 1))
                rows = model.run(below[-1], piece, stop - 1, stop)
            else:
                rows = model.run(rows, piece, start, stop)
            out.append(rows)
        lengths = [len(text.rows) for text in texts]
        for text, rows in zip(texts, torch.cat(out).split(lengths), strict=True):
            text.hidden = rows
        if not scored:
            return []
        lasts = (torch.tensor(lengths).cumsum(0) - 1).to(step.device)
        layer, asking = model.layers[stop - 1], step.take(lasts)
        assert isinstance(layer, Layer)
        return layer.weigh(layer.query(torch.cat(below)[lasts], asking), asking)

    def _prune(self, text: _Text, cache: KVCache, point: PrunePoint, weights: Tensor) -> None:
        """Choose what goes on behind a point. What is computed and does not waits there."""
        count = max(1, ceil(point.keep * len(text.alive) - 1e-9))
        text.alive = text.alive[self._choose(weights, count).cpu()]
        assert text.alive[-1] == text.position, "the new token goes on"
        stays = torch.isin(text.rows, text.alive)
        gone = (~stays).to(text.hidden.device)
        cache.pending[text.slot].add(point.layer, text.rows[~stays], text.hidden[gone])
        text.rows, text.hidden = text.rows[stays], text.hidden[stays.to(text.hidden.device)]

"""One pass that verifies a draft and makes the next: streams accompany its nodes through the upper layers.

To the layers a stream is one more branch of the tree. It is stored behind the draft, where only later streams of the
same node read it, and it is dropped when the kept path is committed. So kernels need no change and no attention mask
for streams, and the bits of a row do not depend on its streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder
from vivace.core.seams import Draft, Span, TargetPass
from vivace.core.step import Step
from vivace.methods.multistream.config import StreamPlan
from vivace.methods.multistream.streams import Streams, expected_at, known_at


@dataclass(frozen=True)
class StreamPass(TargetPass):
    """A target pass, and the residuals from which the next draft is made."""

    streams: Tensor | None = None
    """(n, streams, E) after the last layer; None where streams follow the kept node in a pass of their own."""
    entering: Tensor | None = None
    """(n, E) residuals entering the insertion layer, for such a pass."""


class Verified(NamedTuple):
    """What verification computed at the last committed position of each slot."""

    final: Tensor
    """(n, E) residuals after the last layer."""
    tokens: Tensor
    """(n,) the next roots."""


class StreamForwardPass:
    """Implements ``Traversal``: main rows run to the insertion layer, are pruned there, and run on together with
    streams.
    """

    def __init__(self, streams: Streams, plan: StreamPlan) -> None:
        self.streams = streams
        self.plan = plan
        self._deltas: dict[tuple[int, int], LowRankDeltas] = {}
        self._quantized: Span | None = None
        """The upper layers with quantized weights, where the plan asks for them."""

    def prepare(self, model: Decoder) -> None:
        """Make quantized copies now, so that the first draft takes no longer than the next."""
        if self.plan.weights != "bf16" and model.backend.span is not None:
            self._quantized = model.backend.span.quantized(
                self.streams.config.insertion_layer, model.config.num_layers, self.plan.weights
            )

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> StreamPass:
        """Run one pass for the rows of all slots together."""
        insertion_layer = self.streams.config.insertion_layer
        step = Step.of(draft, cache, chunk=chunk)
        main = model.run(model.embed(draft.tokens, step), step, 0, insertion_layer)
        rows = torch.arange(len(draft.tokens), device=draft.device)
        if self.plan.threshold and len(rows) > len(draft.slots):
            rows = torch.tensor(self.surviving(model, draft, main), device=draft.device)
            if len(rows) < len(main):
                step, main = step.take(rows), main[rows]
        if self.plan.attach == "kept":
            return StreamPass(model.run(main, step, insertion_layer), rows, entering=main)
        return self._together(model, main, step, rows)

    def _together(self, model: Decoder, main: Tensor, step: Step, rows: Tensor) -> StreamPass:
        """Run main rows (n, E) from the insertion layer on, each with its streams.

        Quantized streams run behind all main rows, of which they read only what those have stored.
        """
        insertion_layer, count, num_main = self.streams.config.insertion_layer, len(self.plan.widths), len(rows)
        both = step.branched(count, self.deltas(num_main, num_main * count))
        own = torch.arange(num_main, both.num_rows, device=rows.device)
        known = None
        if self.streams.config.feedback:
            known = expected_at(model, self.streams, main, both.take(own[::count]))
        start = self.streams.start(main, count, known).flatten(0, 1)
        if self._quantized is None:
            top = model.run(torch.cat((main, start)), both, insertion_layer)
            return StreamPass(top[:num_main], rows, streams=top[num_main:].view(num_main, count, -1))
        hidden = model.run(main, step, insertion_layer)
        alone = replace(step.branched(count).take(own), deltas=(self.deltas(0, len(start)),))
        return StreamPass(hidden, rows, streams=self._upper(model, start, alone).view(num_main, count, -1))

    def follow(
        self, model: Decoder, slots: Sequence[int], entering: Tensor, cache: KVCache, verified: Verified | None = None
    ) -> Tensor:
        """Run the streams of each slot's last committed position, (n, E) -> (n, streams, E) after the last layer.

        Args:
            model: the target.
            slots: n slots.
            entering: (n, E) residuals of those positions entering the insertion layer.
            cache: holds the keys and values of the main stream.
            verified: the input of streams with feedback.
        """
        count = len(self.plan.widths)
        positions = [cache.lengths[slot] + place for slot in slots for place in range(count)]
        step = Step.at(cache, [slot for slot in slots for _ in range(count)], positions)
        known = None
        if verified is not None:
            first = step.take(torch.arange(0, len(positions), count, device=step.device))
            known = known_at(model, verified.final, model.embed(verified.tokens, first))
        start = self.streams.start(entering, count, known).flatten(0, 1)
        step = replace(step, deltas=(self.deltas(0, len(start)),))
        return self._upper(model, start, step).view(len(slots), count, -1)

    def _upper(self, model: Decoder, start: Tensor, step: Step) -> Tensor:
        """Run streams without main rows through the layers above the insertion, with the weights that the
        plan names.
        """
        insertion_layer = self.streams.config.insertion_layer
        if self._quantized is None or not self._quantized.covers(step):
            return model.run(start, step, insertion_layer)
        return self._quantized.run(start, step, insertion_layer, model.config.num_layers)

    def surviving(self, model: Decoder, draft: Draft, main: Tensor) -> list[int]:
        """Return the rows whose path has only edges with ``Z_parent[token] >= threshold``; roots always survive."""
        assert self.streams.pruner is not None, "checked by the plan"
        distribution = self.streams.pruner.distribution(main, model)
        parents, tokens, depths = draft.lists.parent, draft.lists.tokens, draft.depths
        chances = distribution[draft.parent.clamp(min=0), draft.tokens].tolist()
        kept: set[int] = set()
        for row in range(len(tokens)):
            if depths[row] == 0 or (parents[row] in kept and chances[row] >= self.plan.threshold):
                kept.add(row)
        return sorted(kept)

    def deltas(self, num_main: int, num_streams: int) -> LowRankDeltas:
        """Return the adapters of a call; calls of the same shape share one object."""
        if (num_main, num_streams) not in self._deltas:
            which = torch.full((num_main + num_streams,), -1, device=self.streams.device)
            which[num_main:] = 0
            self._deltas[num_main, num_streams] = self.streams.deltas(which, len(self.plan.widths))
        return self._deltas[num_main, num_streams]

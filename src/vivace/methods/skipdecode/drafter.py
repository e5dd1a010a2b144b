"""SkipDecode: the position of a token alone decides how many layers it passes (Del Corro et al. 2023,
arXiv:2307.02628).

With t new tokens before it, a token has a budget of

    b(t) = most - (most - fewest) min(1, t / horizon)

layers: the first ``warmup`` ones and the topmost, so that more and more middle layers are skipped. Budgets never grow,
so every layer that a row passes, all rows before it have passed: no entry is missing, nothing is recomputed, and rows
of a batch need not exit together. The prompt passes every layer. Only a model fine-tuned for its schedule
(``SkipObjective``) writes sensible text; the method runs on any model, and its answers show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoDrafts
from vivace.errors import ConfigError
from vivace.train.data import TokenBatch
from vivace.train.next_token import NextToken
from vivace.train.objective import LossParts


@dataclass(frozen=True)
class SkipPlan:
    """The schedule."""

    most: int = 18
    """Number of layers of the first new token."""
    fewest: int = 8
    """Number of layers from ``horizon`` new tokens on."""
    horizon: int = 48
    warmup: int = 1
    """Number of first layers that every token passes."""

    def __post_init__(self) -> None:
        if not 0 < self.warmup < self.fewest <= self.most or self.horizon < 1:
            raise ConfigError(
                f"skipdecode needs 0 < warmup < fewest <= most and horizon >= 1, found {self.warmup}, {self.fewest}, "
                f"{self.most} and {self.horizon}"
            )

    def check_fits(self, num_layers: int) -> None:
        """Raise an error for a schedule of more layers than the model has."""
        if self.most > num_layers:
            raise ConfigError(f"most is {self.most}, the model has {num_layers} layers")

    def first(self, place: int, num_layers: int) -> int:
        """Return the first layer after the warm-up of the token with ``place`` new tokens before it."""
        budget = self.most - (self.most - self.fewest) * min(1.0, max(0, place) / self.horizon)
        return num_layers - (int(budget) - self.warmup)


class SkipForwardPass:
    """Implements ``Traversal``: rows skip to the topmost layers as their positions say."""

    def __init__(self, plan: SkipPlan) -> None:
        self.plan = plan

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run the rows; those with larger budgets begin at lower layers, and the others join them above."""
        if chunk:
            return ForwardPass().run(model, draft, cache, chunk=True)
        num_layers, step = model.config.num_layers, Step.of(draft, cache)
        h = model.run(model.embed(draft.tokens, step), step, 0, self.plan.warmup)
        places = zip(step.position.tolist(), draft.lists.slot, strict=True)
        first = [self.plan.first(position - cache.prompts[slot] + 1, num_layers) for position, slot in places]
        stops = [*sorted(set(first)), num_layers]
        for start, stop in pairwise(stops):
            rows = torch.tensor([row for row, at in enumerate(first) if at <= start], device=h.device)
            if len(rows) == len(first):
                h = model.run(h, step, start, stop)
            else:
                h = h.index_copy(0, rows, model.run(h[rows], step.take(rows), start, stop))
        depth = torch.tensor([num_layers - at + self.plan.warmup for at in first])
        return TargetPass(h, torch.arange(len(first)), depth, depth)


class SkipDecode(NoDrafts):
    """Implements ``Drafter``: drafts nothing and decodes with skipped layers."""

    def __init__(self, model: Decoder, plan: SkipPlan | None = None) -> None:
        self.plan = SkipPlan(*_spread(model.config.num_layers)) if plan is None else plan
        self.plan.check_fits(model.config.num_layers)
        super().__init__("skipdecode", SkipForwardPass(self.plan))


def _spread(num_layers: int) -> tuple[int, int]:
    """Return three quarters and a third of the layers, the default schedule."""
    return max(2, num_layers * 3 // 4), max(2, num_layers // 3)


class SkipObjective(NextToken):
    """``NextToken`` in which each row passes only the layers of its schedule."""

    def __init__(self, model: Decoder, plan: SkipPlan, *, rows: int = 1024, recompute: bool = False) -> None:
        """Create the objective.

        Raises:
            ConfigError: the schedule is for a deeper model.
        """
        super().__init__(model, rows=rows, recompute=recompute)
        plan.check_fits(model.config.num_layers)
        self.plan = plan
        self._first = torch.zeros(0, dtype=torch.int64)

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the losses of ``NextToken``, with positions counted from each answer's first token."""
        length, count = batch.tokens.shape[1], model.config.num_layers
        begins = batch.scored.int().argmax(1)
        place = torch.arange(length, device=begins.device) - begins[:, None] + 1
        firsts = torch.tensor([self.plan.first(at, count) for at in range(length + 1)], device=begins.device)
        self._first = torch.where(place < 0, 0, firsts[place.clamp(min=0)]).reshape(-1)
        yield from super().losses(model, batch)

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        for layer in range(model.config.num_layers):
            passes = (self._first <= layer) | (layer < self.plan.warmup)
            above = self._layer(model, h, step, layer)
            h = above if bool(passes.all()) else torch.where(passes[:, None], above, h)
        return h

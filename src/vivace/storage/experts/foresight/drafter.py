"""Plain decoding that predicts experts on the way: what ``weights.py`` and ``forecast.py`` were trained for.

Before a pass the forecast predicts the experts of all its layers. During the pass the accelerated residual, where there
is one, predicts those of layers above it, and the slow residual those of layers at the lookahead distances of the plan.
Whatever holds the experts may read them early; what runs is what the true routers choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.storage.experts.foresight.config import ForesightPlan
from vivace.storage.experts.foresight.forecaster import Forecaster
from vivace.storage.experts.foresight.routers import ExpertRouters
from vivace.storage.experts.foresight.weights import Foresight


class ForesightDrafter(OwnsNoCache):
    """Implements ``Drafter``: decodes plainly, and predicts experts on the way."""

    def __init__(self, foresight: Foresight, plan: ForesightPlan, name: str = "foresight") -> None:
        """Set what predicts.

        Args:
            foresight: trained on the model.
            plan: how it is used.
            name: of the method.
        """
        self.name = name
        self._traversal = ForesightForwardPass(foresight, plan)

    def open(self, cache: KVCache) -> ForesightState:
        """Open the state of a session that has decided nothing yet."""
        return ForesightState(self._traversal)


class ForesightState(Forgetful):
    """Implements ``DraftState``: keeps the last residual of each slot, from which the forecast begins."""

    def __init__(self, inner: ForesightForwardPass) -> None:
        """Begin without sequences; ``inner`` runs the passes and predicts."""
        self._inner = inner
        self.traversal: Traversal = self
        self._ends: dict[int, Tensor] = {}
        """By slot, the residual (E) from which the last token was decided, the one that is not in the cache yet."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run a pass, and forecast it from the last residual of each slot."""
        return self._inner.run(model, draft, cache, chunk=chunk, ends=self._ends)

    def propose(self, context: Context) -> Draft:
        """Propose nothing beside the decided tokens."""
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Remember the residual of the last row that was kept, or of the last row of a prompt chunk."""
        rows = draft.last_rows if verdict is None else [path[-1] for path in verdict.paths]
        for slot, row in zip(draft.slots, rows, strict=True):
            self._ends[slot] = passed.hidden[row].clone()

    def release(self, slots: Sequence[int]) -> None:
        """Forget the residuals of these slots."""
        for slot in slots:
            self._ends.pop(slot, None)


class ForesightForwardPass:
    """Implements ``Traversal``: runs all rows through all layers, and prefetches experts for the layers to come."""

    def __init__(self, foresight: Foresight, plan: ForesightPlan) -> None:
        """Set what predicts.

        Args:
            foresight: trained on the model.
            plan: how it is used.
        """
        assert foresight.model.moe is not None
        self.foresight = foresight
        self.count = foresight.model.moe.top_k if plan.count is None else plan.count
        self.lookaheads = plan.leads
        self.depth = foresight.config.depth(foresight.model.num_layers)
        forecast = foresight.forecast
        self._forecaster = None if forecast is None else Forecaster(forecast, plan.at_least)
        self._routers_at: dict[int, ExpertRouters | None] = {}
        """By depth, the routers that are asked there; None where there are none."""
        self._deltas: dict[int, LowRankDeltas] = {}
        """By the number of rows of a call: backends lay deltas out once for each object."""

    def run(
        self,
        model: Decoder,
        draft: Draft,
        cache: KVCache,
        *,
        chunk: bool = False,
        ends: Mapping[int, Tensor] | None = None,
    ) -> TargetPass:
        """Run one pass for all slots; nothing is predicted for prompt chunks, which choose nearly all experts.

        Args:
            model: the decoder.
            draft: the rows; nothing is predicted for rows that enter above the first layer either.
            cache: of their slots.
            chunk: whether they are prompt chunks.
            ends: by slot, the residual (E) that its first row was decided from, as far as it is known.
        """
        step = Step.of(draft, cache, chunk=chunk)
        start, rows = draft.entry_layer, torch.arange(len(draft.tokens), device=draft.device)
        slow = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        if step.is_prompt or start:
            slow = model.run(slow, step, start)
        else:
            if self._forecaster is not None:
                self._forecaster.predict(model, draft, slow, {} if ends is None else ends)
            if self.foresight.config.rate is not None:
                slow = self._ahead(model, slow, step, rows)
            watch = (lambda index, h: self._prefetch(model, index + 1, h, h)) if self.lookaheads else None
            slow = model.run(slow, step, self.depth, watch=watch)
        return TargetPass(hidden=slow, rows=rows)

    def _ahead(self, model: Decoder, slow: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Run slow and accelerated rows together as far as the latter go, and return the slow rows (T, E) there."""
        count = len(rows)
        if count not in self._deltas:
            which = torch.cat((torch.full_like(rows, -1), torch.zeros_like(rows)))
            self._deltas[count] = self.foresight.deltas(which)
        both = step.readers(rows, self._deltas[count], fed=False)
        self._prefetch(model, 0, slow, slow)
        out = model.run(
            torch.cat((slow, slow)),
            both,
            stop=self.depth,
            watch=lambda index, h: self._prefetch(model, index + 1, h[count:], h[:count]),
        )
        return out[:count]

    def _prefetch(self, model: Decoder, depth: int, p: Tensor, slow: Tensor) -> None:
        """Prefetch what routers say after ``depth`` layers, of p for later layers and of the slow residual early."""
        if depth not in self._routers_at:
            self._routers_at[depth] = self._collect_routers(model, depth)
        routers = self._routers_at[depth]
        if routers is not None:
            for mixture, experts in zip(routers.mixtures, routers.likeliest(p, slow), strict=True):
                mixture.experts.prefetch(experts)

    def _collect_routers(self, model: Decoder, depth: int) -> ExpertRouters | None:
        """Collect the routers that are asked after ``depth`` layers, each of them only once."""
        c, count = model.config, self.count
        assert c.moe is not None
        ahead = dict.fromkeys(self.foresight.targets(depth), count)
        early: list[tuple[int, int]] = []
        for lookahead in self.lookaheads:
            layer = depth + lookahead
            if depth > 0 and layer < c.num_layers and c.is_moe(layer):
                if layer in ahead:
                    ahead[layer] = max(count, c.moe.top_k)
                else:
                    early.append((layer, lookahead))
        return ExpertRouters.of(model, self.foresight, ahead, early) if ahead or early else None

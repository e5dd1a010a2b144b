"""Decoding while experts are foreseen: what ``weights.py`` and ``forecast.py`` were trained for.

Before a pass the forecast speaks of all its layers. On the way up the accelerated residual, where there is one, speaks
of layers above it, and the slow residual of those that lie a lead ahead. Whoever gives the experts is told, and may
load what is likely; what runs is what the true routers choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.cpu.packed import PackedLinear
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts, likeliest
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.decode.plain import Forgetful
from vivace.kernels import native
from vivace.kernels.native import NativeBody
from vivace.methods.foresight.forecast import Forecaster
from vivace.methods.foresight.weights import Foresight, ForesightPlan, of_mean_square_one


class Foreseeing:
    """Fills ``Drafter``: plain decoding whose experts are foreseen."""

    def __init__(self, foresight: Foresight, plan: ForesightPlan, name: str = "foresight") -> None:
        """Set how.

        Args:
            foresight: trained on the model.
            plan: how it is used.
            name: of the method.
        """
        self.name = name
        self.forward = ForesightForwardPass(foresight, plan)

    def open(self, cache: KVCache) -> ForeseeingState:
        """State of a session that has decided nothing yet."""
        return ForeseeingState(self.forward)


class ForeseeingState(Forgetful):
    """Fills ``DraftState``: remembers where the text of each slot has come out, which is what a forecast reads."""

    def __init__(self, climb: ForesightForwardPass) -> None:
        """Take rows up by ``climb``."""
        self.forward = climb
        self.traversal: Traversal = self
        self._ends: dict[int, Tensor] = {}
        """By slot: the residual (E) that the token which is not stored yet was decided from."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Fills ``Traversal``: the forecast of a slot begins where its text has come out."""
        return self.forward.run(model, draft, cache, chunk=chunk, ends=self._ends)

    def propose(self, context: Context) -> Draft:
        """The decided tokens alone."""
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """The next token follows the last row that was kept; after a prompt chunk its last row."""
        rows = draft.last_rows if verdict is None else [path[-1] for path in verdict.paths]
        for slot, row in zip(draft.slots, rows, strict=True):
            self._ends[slot] = passed.hidden[row].clone()

    def release(self, slots: Sequence[int]) -> None:
        """Whoever is in the slot next says something else."""
        for slot in slots:
            self._ends.pop(slot, None)


class ForesightForwardPass:
    """Fills ``Traversal``: all rows up the layers, while mixtures are told which experts will be needed."""

    def __init__(self, foresight: Foresight, plan: ForesightPlan) -> None:
        """Set how.

        Args:
            foresight: trained on the model.
            plan: how it is used.
        """
        assert foresight.model.moe is not None
        self.foresight = foresight
        self.count = foresight.model.moe.top_k if plan.count is None else plan.count
        self.leads = plan.leads
        self.depth = foresight.config.depth(foresight.model.num_layers)
        forecast = foresight.forecast
        self._forecaster = None if forecast is None else Forecaster(forecast, plan.at_least)
        self._asked: dict[int, Routers | None] = {}
        """By depth; None where nothing is asked."""
        self._deltas: dict[int, LowRankDeltas] = {}
        """By rows of a call, so that whoever lays them out does so once."""

    def run(
        self,
        model: Decoder,
        draft: Draft,
        cache: KVCache,
        *,
        chunk: bool = False,
        ends: Mapping[int, Tensor] | None = None,
    ) -> TargetPass:
        """One pass for all slots; prompt chunks, which choose nearly all experts, and late rows go up alone.

        Args:
            model: the decoder.
            draft: rows to take up.
            cache: of their slots.
            chunk: they are prompt chunks.
            ends: by slot, the residual (E) that its first row was decided from, as far as it is known.
        """
        step = Step.of(draft, cache, chunk=chunk)
        start, rows = draft.entry_layer, torch.arange(len(draft.tokens))
        slow = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        if step.is_prompt or start:
            slow = model.run(slow, step, start)
        else:
            if self._forecaster is not None:
                self._forecaster.tell(model, draft, slow, {} if ends is None else ends)
            if self.foresight.config.rate is not None:
                slow = self._ahead(model, slow, step, rows)
            watch = (lambda index, h: self._tell(model, index + 1, h, h)) if self.leads else None
            slow = model.run(slow, step, self.depth, watch=watch)
        return TargetPass(hidden=slow, rows=rows)

    def _ahead(self, model: Decoder, slow: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Both streams as far as the accelerated one goes: slow rows there."""
        count = len(rows)
        if count not in self._deltas:
            which = torch.cat((torch.full((count,), -1), torch.zeros(count, dtype=torch.int64)))
            self._deltas[count] = self.foresight.deltas(which)
        both = step.readers(rows, self._deltas[count], fed=False)
        self._tell(model, 0, slow, slow)
        out = model.run(
            torch.cat((slow, slow)),
            both,
            stop=self.depth,
            watch=lambda index, h: self._tell(model, index + 1, h[count:], h[:count]),
        )
        return out[:count]

    def _tell(self, model: Decoder, depth: int, p: Tensor, slow: Tensor) -> None:
        """What p says of later layers, and the slow residual of those that lie a lead ahead."""
        if depth not in self._asked:
            self._asked[depth] = self._routers(model, depth)
        routers = self._asked[depth]
        if routers is not None:
            for mixture, experts in zip(routers.mixtures, routers.likeliest(p, slow), strict=True):
                mixture.experts.expect(experts)

    def _routers(self, model: Decoder, depth: int) -> Routers | None:
        c, count = model.config, self.count
        assert c.moe is not None
        ahead = dict.fromkeys(self.foresight.targets(depth), count)
        early: list[tuple[int, int]] = []
        for lead in self.leads:
            layer = depth + lead
            if depth > 0 and layer < c.num_layers and c.is_moe(layer):
                if layer in ahead:
                    ahead[layer] = max(count, c.moe.top_k)
                else:
                    early.append((layer, lead))
        return Routers.of(model, self.foresight, ahead, early) if ahead or early else None


@dataclass(frozen=True, eq=False)
class Routers:
    """Routers of n layers asked at once, in float32: small products in bfloat16 take PyTorch ten times as long.

    Their logits are those of ``Layer.route`` but for rounding.
    """

    mixtures: tuple[MixtureOfExperts, ...]
    scale: Tensor
    """s_m, (n, 1, E)."""
    slow_scale: Tensor
    """t_m, (n, 1, E)."""
    weight: Tensor
    """(n, E, X), what the norms multiply by folded in."""
    model: ModelConfig
    """Says how residuals are normed before routers."""
    body: NativeBody | None = None
    """What the routers themselves run on."""

    counts: tuple[int, ...] = ()
    """Experts that each is asked for, for every row."""

    @staticmethod
    def of(model: Decoder, foresight: Foresight, ahead: Mapping[int, int], early: Sequence[tuple[int, int]]) -> Routers:
        """Those of some mixtures of a model, which stays as it is.

        Args:
            model: whose routers are asked.
            foresight: what is added to them, and how p and the slow residual are mixed.
            ahead: how many experts each of these layers is asked for about p.
            early: layers that are asked about the slow residual, for as many as they take, and how early.
        """
        c, mixtures, weights, body = model.config, [], [], None
        assert c.moe is not None
        for index, lead in (*((index, None) for index in ahead), *early):
            layer = model.layers[index]
            assert isinstance(layer, Layer)
            assert isinstance(layer.feed_forward, MixtureOfExperts)
            mixtures.append(layer.feed_forward)
            weights.append(foresight.router(layer, lead))
            router = layer.feed_forward.router
            body = router.body if isinstance(router, PackedLinear) else None
        weight = torch.stack(weights).detach().float().mT.contiguous()
        scale = torch.zeros(len(weights), 1, c.width)
        slow_scale = torch.ones_like(scale)
        if ahead:
            scale[: len(ahead)], slow_scale[: len(ahead)] = (each[:, None].float() for each in foresight.scales(ahead))
        counts = tuple(min(count, weight.shape[-1]) for count in (*ahead.values(), *(c.moe.top_k for _ in early)))
        return Routers(tuple(mixtures), scale, slow_scale, weight, c, body, counts)

    def likeliest(self, p: Tensor, slow: Tensor) -> list[list[int]]:
        """The most likely experts of each row (T, E), together, the likeliest first, for each router."""
        if self.body is not None and len(p) == 1:
            return self.body.likeliest(self._alone, p, slow)
        each = self.logits(p, slow)[:, None]
        return [likeliest(logits, count)[0] for logits, count in zip(each, self.counts, strict=True)]

    @cached_property
    def _alone(self) -> native.Routers:
        """The same routers for one row on native kernels."""
        return native.Routers(self.scale, self.slow_scale, self.weight, self.counts)

    def logits(self, p: Tensor, slow: Tensor) -> Tensor:
        """(T, E) twice -> (n, T, X)."""
        x = torch.addcmul(p.float() * self.scale, slow.float(), self.slow_scale)
        return torch.bmm(of_mean_square_one(x, self.model), self.weight)

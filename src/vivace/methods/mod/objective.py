"""Fine-tuning a base into a Mixture-of-Depths (``mod.py``), and finding its thresholds.

In every answer the tokens that predict it compete for the routed layers: the share ``capacity`` of them with the
largest r goes through, from all of them at first down to that share within ``anneal_steps`` steps, so that the base is
not torn apart at once. Beside the loss on tokens each router learns, from a residual that is cut from the graph, to
tell who is among them. Held-back rows are always routed at the final share.

The keys and values of tokens that skip are those of the residual that passes by, as while decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.methods.mod.drafter import DepthRouters, ModConfig, ModPlan, gated
from vivace.train.data import TokenBatch
from vivace.train.next_token import NextToken
from vivace.train.objective import LossParts


class ModObjective(NextToken):
    """``NextToken`` where routers let only some rows of an answer through."""

    def __init__(
        self, model: Decoder, config: ModConfig, *, anneal_steps: int = 100, telling: float = 0.1, rows: int = 1024
    ) -> None:
        """Prepare.

        Args:
            model: what is trained, beside its routers.
            config: which layers have a router.
            anneal_steps: steps until the share of tokens has fallen to ``config.capacity``.
            telling: weight of what teaches a router to tell who is among the largest.
            rows: positions whose logits are held at once.

        Raises:
            ConfigError: no layer would have a router.
        """
        super().__init__(model, rows=rows)
        self.anneal_steps = anneal_steps
        self.telling = telling
        self.routers = DepthRouters(config, model.config)
        self.step = 0
        self._answers = torch.zeros(0, 0, dtype=torch.bool)
        self._told: list[Tensor] = []

    def groups(self) -> Sequence[Mapping[str, object]]:
        """The decoder's, and the routers, which learn faster."""
        routers = list(self.routers.parameters())
        return [*super().groups(), {"params": routers, "name": "routers", "rate": 10.0, "weight_decay": 0.0}]

    @property
    def capacity(self) -> float:
        """Share of an answer's rows that goes through now."""
        final = self.routers.config.capacity
        if not torch.is_grad_enabled():
            return final
        return final + (1 - final) * max(0.0, 1 - self.step / max(1, self.anneal_steps))

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """As ``NextToken``, what teaches the routers beside the last part."""
        self._answers = F.pad(batch.scored[:, 1:], (0, 1))
        for loss, seen in super().losses(model, batch):
            if seen:
                yield loss, seen
            else:
                told = torch.stack(self._told).mean()
                yield loss + self.telling * told, {"telling": float(told.detach()), "capacity": self.capacity}

    def updated(self) -> None:
        """One step nearer to the final share."""
        self.step += 1

    def state(self) -> Mapping[str, Any]:
        """For a run that goes on later."""
        return {"step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.step = int(state["step"])

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        self._told, below = [], 0
        answers = self._answers.reshape(-1)
        for place, layer in enumerate(self.routers.layers):
            h = model.run(h, step, below, layer)
            r = self.routers.logit(place, h)
            passes = largest(r.detach(), self._answers, self.capacity)
            cut = self.routers.logit(place, h.detach())[answers]
            self._told.append(F.binary_cross_entropy_with_logits(cut, passes[answers].float()))
            h = routed(model, layer, h, step, passes, r, answers)
            below = layer + 1
        return model.run(h, step, below)


def largest(r: Tensor, answers: Tensor, capacity: float) -> Tensor:
    """Rows that go through: in each text the share ``capacity`` of its answer's with the largest r, and all others.

    Args:
        r: (B * T,).
        answers: (B, T) bool.
        capacity: rounded up to a whole number of rows.
    """
    ranked = r.view(answers.shape).masked_fill(~answers, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(answers.shape[1], device=answers.device)
    rank = torch.empty_like(ranked).scatter_(1, ranked, places.expand_as(ranked))
    count = torch.ceil(answers.sum(1, keepdim=True) * capacity - 1e-6)
    return ((rank < count) | ~answers).reshape(-1)


def routed(model: Decoder, layer: int, h: Tensor, step: Step, passes: Tensor, r: Tensor, answers: Tensor) -> Tensor:
    """A routed layer of a dense call, (B * T, E) -> (B * T, E); rows outside answers go through as they are.

    Args:
        model: the decoder.
        layer: which.
        h: rows entering it.
        step: the dense call.
        passes: (B * T,) bool.
        r: (B * T,).
        answers: (B * T,) bool.
    """
    through = model.run(h, step, layer, layer + 1)
    return torch.where(passes[:, None], gated(h, through, torch.where(answers, r, 0.0)), h)


@torch.no_grad()
def thresholds_on(model: Decoder, routers: DepthRouters, batches: Sequence[TokenBatch]) -> ModPlan:
    """Layer by layer the threshold that lets the share ``capacity`` of answer rows through, lower ones in force."""
    steps = [Step.dense(*batch.tokens.shape, device=batch.tokens.device) for batch in batches]
    answers = [F.pad(batch.scored[:, 1:], (0, 1)).reshape(-1) for batch in batches]
    rows = [model.embed(batch.tokens.reshape(-1), step) for batch, step in zip(batches, steps, strict=True)]
    found, below = list[float](), 0
    for place, layer in enumerate(routers.layers):
        rows = [model.run(h, step, below, layer) for h, step in zip(rows, steps, strict=True)]
        told = [routers.logit(place, h) for h in rows]
        known = torch.cat([r[own] for r, own in zip(told, answers, strict=True)]).sort().values
        last = round((1 - routers.config.capacity) * len(known)) - 1
        found.append(float(known[last]) if last >= 0 else float(known[0]) - 1.0)
        rows = [
            routed(model, layer, h, step, (r > found[-1]) | ~own, r, own)
            for h, step, r, own in zip(rows, steps, told, answers, strict=True)
        ]
        below = layer + 1
    return ModPlan(tuple(found))

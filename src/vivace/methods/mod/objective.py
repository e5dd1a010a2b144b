"""Fine-tuning a model into a Mixture-of-Depths (``drafter.py``), and calibrating its thresholds.

In every answer, the tokens compete for the routed layers: the share ``capacity`` with the largest r passes. It starts
at all tokens and falls to that share within ``anneal_steps`` steps, so that the model is not damaged at once. Beside
the loss on tokens, each router learns, from a residual detached from the graph, to predict which tokens pass. Held-back
rows are always routed at the final share.

Tokens that skip a layer store keys and values of their unchanged residual, as while decoding.
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
    """``NextToken`` for a model whose routers let only some rows of an answer pass."""

    def __init__(
        self,
        model: Decoder,
        config: ModConfig,
        *,
        anneal_steps: int = 100,
        router_weight: float = 0.1,
        rows: int = 1024,
    ) -> None:
        """Create the objective and its routers.

        Args:
            model: the model, which is trained beside its routers.
            config: which layers have a router.
            anneal_steps: number of steps until the share of tokens has fallen to ``config.capacity``.
            router_weight: weight of the loss by which routers learn to predict which tokens are among the largest.
            rows: number of positions whose logits are in memory at once.

        Raises:
            ConfigError: no layer would have a router.
        """
        super().__init__(model, rows=rows)
        self.anneal_steps = anneal_steps
        self.router_weight = router_weight
        self.routers = DepthRouters(config, model.config)
        self.step = 0
        self._answers = torch.zeros(0, 0, dtype=torch.bool)
        self._router_losses: list[Tensor] = []

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the parameter groups of the decoder, and the routers with ten times its learning rate."""
        routers = list(self.routers.parameters())
        return [*super().groups(), {"params": routers, "name": "routers", "rate": 10.0, "weight_decay": 0.0}]

    @property
    def capacity(self) -> float:
        """Return the share of an answer's rows that passes now."""
        final = self.routers.config.capacity
        if not torch.is_grad_enabled():
            return final
        return final + (1 - final) * max(0.0, 1 - self.step / max(1, self.anneal_steps))

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the losses of ``NextToken``; the last part also has the routers' loss."""
        self._answers = F.pad(batch.scored[:, 1:], (0, 1))
        for loss, seen in super().losses(model, batch):
            if seen:
                yield loss, seen
            else:
                router_loss = torch.stack(self._router_losses).mean()
                seen = {"router_loss": float(router_loss.detach()), "capacity": self.capacity}
                yield loss + self.router_weight * router_loss, seen

    def updated(self) -> None:
        """Count the step, which lowers the share of rows that pass."""
        self.step += 1

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, to resume from."""
        return {"step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        self.step = int(state["step"])

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        self._router_losses, below = [], 0
        answers = self._answers.reshape(-1)
        for place, layer in enumerate(self.routers.layers):
            h = model.run(h, step, below, layer)
            r = self.routers.logit(place, h)
            passes = largest(r.detach(), self._answers, self.capacity)
            cut = self.routers.logit(place, h.detach())[answers]
            self._router_losses.append(F.binary_cross_entropy_with_logits(cut, passes[answers].float()))
            h = routed(model, layer, h, step, passes, r, answers)
            below = layer + 1
        return model.run(h, step, below)


def largest(r: Tensor, answers: Tensor, capacity: float) -> Tensor:
    """Return which rows pass, (B * T,): the share ``capacity`` of each answer with the largest r, and all other rows.

    Args:
        r: (B * T,).
        answers: (B, T) bool: rows of answers.
        capacity: share, rounded up to a whole number of rows.
    """
    ranked = r.view(answers.shape).masked_fill(~answers, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(answers.shape[1], device=answers.device)
    rank = torch.empty_like(ranked).scatter_(1, ranked, places.expand_as(ranked))
    count = torch.ceil(answers.sum(1, keepdim=True) * capacity - 1e-6)
    return ((rank < count) | ~answers).reshape(-1)


def routed(model: Decoder, layer: int, h: Tensor, step: Step, passes: Tensor, r: Tensor, answers: Tensor) -> Tensor:
    """Run a routed layer for all rows of a dense call, (B * T, E) -> (B * T, E).

    Rows outside answers pass without a factor.

    Args:
        model: the decoder.
        layer: index of the layer.
        h: rows entering it.
        step: the dense call.
        passes: (B * T,) bool: rows that pass.
        r: (B * T,).
        answers: (B * T,) bool: rows of answers.
    """
    through = model.run(h, step, layer, layer + 1)
    return torch.where(passes[:, None], gated(h, through, torch.where(answers, r, 0.0)), h)


@torch.no_grad()
def thresholds_on(model: Decoder, routers: DepthRouters, batches: Sequence[TokenBatch]) -> ModPlan:
    """Return, layer by layer, the threshold that lets the share ``capacity`` of answer rows pass, with lower ones in
    force.
    """
    steps = [Step.dense(*batch.tokens.shape, device=batch.tokens.device) for batch in batches]
    answers = [F.pad(batch.scored[:, 1:], (0, 1)).reshape(-1) for batch in batches]
    rows = [model.embed(batch.tokens.reshape(-1), step) for batch, step in zip(batches, steps, strict=True)]
    found, below = list[float](), 0
    for place, layer in enumerate(routers.layers):
        rows = [model.run(h, step, below, layer) for h, step in zip(rows, steps, strict=True)]
        logits = [routers.logit(place, h) for h in rows]
        known = torch.cat([r[own] for r, own in zip(logits, answers, strict=True)]).sort().values
        last = round((1 - routers.config.capacity) * len(known)) - 1
        found.append(float(known[last]) if last >= 0 else float(known[0]) - 1.0)
        rows = [
            routed(model, layer, h, step, (r > found[-1]) | ~own, r, own)
            for h, step, r, own in zip(rows, steps, logits, answers, strict=True)
        ]
        below = layer + 1
    return ModPlan(tuple(found))

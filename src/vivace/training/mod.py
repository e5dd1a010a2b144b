"""Fine-tuning a base into a Mixture-of-Depths (``baselines/mod.py``), and finding its thresholds.

In every answer the tokens that predict it compete for the routed layers: the share ``capacity`` of them with the
largest r goes through, from all of them at first down to that share within ``anneal_steps`` steps, so that the base is
not torn apart at once. Beside the loss on tokens each router learns, from a residual that is cut from the graph, to
tell who is among them. Held-back rows are always routed at the final share.

The keys and values of tokens that skip are those of the residual that passes by, as while decoding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.baselines.mod import ModConfig, ModPlan, Routers, gated
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.engine import load
from vivace.errors import ConfigError
from vivace.prompts import Prompt
from vivace.train.data import Rows, TokenBatch, collate, grouped, pairs_of
from vivace.train.decoder import DecoderRecipe, train_decoder
from vivace.train.loop import TrainResult
from vivace.train.next_token import NextToken
from vivace.train.objective import Parts
from vivace.train.report import Report


@dataclass(frozen=True)
class ModRecipe:
    """How to make a Mixture-of-Depths of a base."""

    kind: Literal["mod"]
    decoder: DecoderRecipe
    """As for any fine-tuning, in one stage."""
    adapter: ModConfig = field(default_factory=ModConfig)
    anneal_steps: int = 100
    """Steps until the share of tokens has fallen to ``adapter.capacity``."""
    telling: float = 0.1
    """Weight of what teaches a router to tell who is among the largest."""

    def __post_init__(self) -> None:
        if self.anneal_steps < 0 or self.telling <= 0:
            raise ConfigError(
                f"anneal_steps must be >= 0 and telling above 0, found {self.anneal_steps} and {self.telling:g}"
            )
        if len(self.decoder.stages) != 1:
            raise ConfigError(f"mod trains in one stage, found {len(self.decoder.stages)}")


class ModObjective(NextToken):
    """``NextToken`` where routers let only some rows of an answer through."""

    def __init__(self, model: Decoder, recipe: ModRecipe, *, rows: int = 1024) -> None:
        """Prepare.

        Raises:
            ConfigError: no layer would have a router.
        """
        super().__init__(model, rows=rows)
        self.recipe = recipe
        self.routers = Routers(recipe.adapter, model.config)
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
        final = self.recipe.adapter.capacity
        if not torch.is_grad_enabled():
            return final
        return final + (1 - final) * max(0.0, 1 - self.step / max(1, self.recipe.anneal_steps))

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """As ``NextToken``, what teaches the routers beside the last part."""
        self._answers = F.pad(batch.scored[:, 1:], (0, 1))
        for loss, seen in super().losses(model, batch):
            if seen:
                yield loss, seen
            else:
                told = torch.stack(self._told).mean()
                yield loss + self.recipe.telling * told, {"telling": float(told.detach()), "capacity": self.capacity}

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
    rank = torch.empty_like(ranked).scatter_(1, ranked, torch.arange(answers.shape[1]).expand_as(ranked))
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
def thresholds_on(model: Decoder, routers: Routers, batches: Sequence[TokenBatch]) -> ModPlan:
    """Layer by layer the threshold that lets the share ``capacity`` of answer rows through, lower ones in force."""
    steps = [Step.dense(*batch.tokens.shape) for batch in batches]
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


def train_mod(
    recipe: ModRecipe, prompts: Sequence[Prompt], out: Path, report: Report, base: str | Path | None
) -> TrainResult:
    """Train, save a checkpoint and its routers (``<out>/adapters/mod``); errors as ``train_decoder``."""
    made: list[ModObjective] = []

    def objective_of(model: Decoder) -> ModObjective:
        made.append(ModObjective(model, recipe))
        return made[-1]

    outcome = train_decoder(
        recipe.decoder, prompts, out, report, base, objective_of=objective_of, part_of=asdict(recipe)
    )
    engine = load(out, kernels="torch")
    pairs = pairs_of(prompts)
    random.Random(recipe.decoder.seed).shuffle(pairs)
    rows = Rows(engine.tokenizer, recipe.decoder.longest).encode(pairs[: recipe.decoder.held_back])
    routers = made[0].routers.to(engine.model.dtype)  # thresholds belong to the weights as they are stored
    batches = [collate(group) for group in grouped(rows, recipe.decoder.tokens_per_batch)]
    plan = thresholds_on(engine.model, routers, batches)
    folder = out / "adapters" / "mod"
    save_adapter(folder, "mod", base_hash(out), asdict(plan), asdict(recipe.adapter), routers.tensors())
    shown = ", ".join(f"{at:.2f}" for at in plan.thresholds)
    report.note(f"saved routers to {folder}; {recipe.adapter.capacity:.0%} go through above {shown}")
    return outcome

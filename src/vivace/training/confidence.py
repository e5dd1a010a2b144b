"""Exits by confidence (``baselines/confidence.py``) calibrated on a model as it is, the learned measure trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vivace.baselines.confidence import (
    Confidence,
    ConfidenceConfig,
    ConfidenceObjective,
    ConfidencePlan,
    calibrated,
    told_by,
)
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.decode.depth import Missing
from vivace.engine import Engine
from vivace.evaluate.contest import Run
from vivace.prompts import Prompt
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report
from vivace.training.frozen import FrozenRecipe, Ground, Outcome
from vivace.training.regenerate import as_it_decodes

QUALITIES = (0.9, 0.95, 0.98, 0.99)
"""Stated agreements that thresholds are found for."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceRecipe(FrozenRecipe):
    """Which measure, at which gates."""

    kind: Literal["calm", "lite"]
    adapter: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    missing: Missing = "propagate"
    """What stands for the entries above an exit: ``deferred``, ``propagate`` or ``mask``."""
    tokens_per_batch: int = 2048

    def begin(self, ground: Ground) -> ConfidenceTraining:
        """A measure that has learnt nothing; only ``learned`` has something to learn."""
        return ConfidenceTraining(self, ground)


class ConfidenceTraining:
    """Fills ``Trainee``."""

    def __init__(self, recipe: ConfidenceRecipe, ground: Ground) -> None:
        self.recipe = recipe
        self.ground = ground
        self.weights = Confidence(recipe.adapter, ground.engine.model.config)
        self.objective = ConfidenceObjective(self.weights)
        self.depth = 1

    def finish(self) -> Outcome:
        """Thresholds found on the held-back rows."""
        model = self.ground.engine.model
        self.weights.to(model.dtype)  # thresholds belong to the weights as they are stored
        told = told_by(model, self.weights, self.ground.batches(self.ground.held_back))
        plans = tuple(calibrated(told, quality) for quality in QUALITIES)
        for plan in plans:
            shown = ", ".join("shut" if at is None else f"{at:.3f}" for at in plan.thresholds)
            self.ground.report.note(f"at agreement {plan.quality:g} the gates open above {shown}")
        return Outcome(ConfidencePlan(plans, self.recipe.missing), self.recipe.adapter, self.weights.tensors())


def train_confidence(
    recipe: ConfidenceRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train what there is to train, calibrate, save and time; everything else as ``run.train_adapter``."""
    ground = Ground.of(recipe, engine, prompts, out, report)
    torch.manual_seed(recipe.seed)
    trainee, base = recipe.begin(ground), base_hash(engine.folder)
    if recipe.adapter.measure == "learned":
        course = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, ground.plan_text(base))
        fit(engine.model, trainee.objective, ground.lessons(), course, folder=out / "run", report=report)
    outcome = trainee.finish()
    tensors = {name: value.to(engine.model.dtype) for name, value in outcome.tensors.items()}
    save_adapter(out, recipe.kind, base, asdict(outcome.plan), asdict(outcome.config), tensors)
    return ground.timed(as_it_decodes(engine, {recipe.kind: out}), recipe.kind)

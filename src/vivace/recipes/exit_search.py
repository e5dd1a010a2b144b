"""Which exit layer an accelerated residual should have: a short training of each, in turn on the same text.

A guess at a lower exit layer reads fewer weights and is wrong more often, and where a model decides differs from model
to model: the one that ships names its next token after a few layers, a chat model of thirty layers after twenty. So
candidates learn for some steps each, the frozen pass shared, and their agreement on held-back rows is put into the law
of the gain (``evaluate/speed_law.py``), with a chance of agreement^i that the i-th guess is kept. The layer with the
largest gain goes on. Agreement after few steps is lower than it will be, most of all for low layers, so this leans
towards higher ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vivace.core.config import ModelConfig
from vivace.decode.shallow import DraftPlan
from vivace.evaluate.speed_law import ModelShape, keeping, speed_up
from vivace.recipes.frozen import Trainable, TrainContext
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.distillation import SharedPasses
from vivace.train.loop import Training, fit_in_turn
from vivace.train.report import Lines

BYTES: Mapping[str, float] = {"bf16": 2.0, "int8": 1.0, "q4": 0.53}
"""Bytes of a weight that drafts read, scales included; other formats count as bf16."""


@dataclass(frozen=True)
class ExitFound:
    """What became of one exit layer."""

    exit_layer: int
    agreement: float
    """Share of held-back tokens at which its guess is the model's token."""
    cost: float
    """Bytes that a guess reads, relative to those of a pass."""
    speed: float
    """Speed relative to plain decoding that this promises, with the best number of guesses."""
    length: int
    """That number of guesses."""


def guess_cost(model: ModelConfig, exit_layer: int, plan: DraftPlan) -> float:
    """Return the bytes that a guess reads, layers and head, relative to those of a pass of the model."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.width * (heads + model.ffn_width * (3 if model.gated else 2))
    head, read = model.width * model.vocab_size, BYTES.get(plan.weights, BYTES["bf16"]) / BYTES["bf16"]
    head_read = read * (plan.vocabulary or model.vocab_size) / model.vocab_size
    share = head / (head + model.num_layers * layer)
    return ModelShape(exit_layer, model.num_layers, share, read=read, head_read=head_read).guess_share


def promised(agreement: float, cost: float, longest: int) -> tuple[float, int]:
    """Return the largest speed relative to plain decoding that chains promise, and their number of guesses."""
    speeds = [speed_up(keeping(agreement, length), cost) for length in range(1, longest + 1)]
    best = max(range(longest), key=speeds.__getitem__)
    return speeds[best], best + 1


def search_exit(
    context: TrainContext, candidates: Mapping[int, Trainable], plan: DraftPlan, steps: int
) -> list[ExitFound]:
    """Train candidates for some steps each, and return what they promise, the best first.

    Their snapshots lie in ``exit-N`` in the folder of the run; a search that was killed goes on from there.

    Args:
        context: the frozen decoder and the rows.
        candidates: untrained weights by exit layer; afterwards they have learnt.
        plan: shape and format of the drafts.
        steps: optimiser steps of each.
    """
    recipe = context.recipe
    loop = LoopConfig(
        steps=steps,
        warmup_steps=min(10, steps),
        hold=recipe.loop.hold,
        clip=recipe.loop.clip,
        autocast=recipe.loop.autocast,
        snapshot_s=recipe.loop.snapshot_s,
        evaluate_steps=steps + 1,  # at the end alone, also of a run that goes on behind its last step
        report_steps=steps,
    )
    trainings = []
    for layer, trainable in candidates.items():
        assert trainable.objective is not None
        config = TrainConfig(loop, recipe.optimiser, recipe.seed, f"exit layer {layer} of {context.plan_text('')}")
        quiet = Lines(lambda text: None)
        folder = context.folder / f"exit-{layer}"
        trainings.append(Training(context.engine.model, trainable.objective, context.data(), config, folder, quiet))
    with SharedPasses() as passes:
        results = fit_in_turn(trainings, lambda: passes.saved_s)
    found = []
    for layer, result in zip(candidates, results, strict=True):
        agreement, cost = result.held_back["agreement"], guess_cost(context.engine.model.config, layer, plan)
        found.append(ExitFound(layer, agreement, cost, *promised(agreement, cost, len(plan.widths))))
        one = found[-1]
        context.report.note(
            f"exit layer {layer}: agreement {agreement:.2f} after {steps} steps, a guess reads {cost:.2f} of a pass, "
            f"{one.speed:.2f}x with {one.length} guesses"
        )
    return sorted(found, key=lambda one: -one.speed)

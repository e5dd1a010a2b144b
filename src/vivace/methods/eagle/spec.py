"""Spec of EAGLE: a one-layer decoder drafts by predicting features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, draft_head, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _eagle(context: MethodContext) -> Drafter:
    from vivace.methods.eagle.drafter import Eagle

    weights, plan = context.trained()
    return Eagle(context.model, weights, with_length(plan, context.length), draft_head(context, plan))


def _feature_drafter() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.eagle.drafter import EagleConfig, EagleLayer
    from vivace.methods.eagle.objective import EagleLoss, EagleObjective

    return Stored(EagleConfig, DraftPlan, EagleLayer, "a feature drafter", objective=EagleObjective, loss=EagleLoss)


def _eagle_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import draft_plans

    return [plan for plan in draft_plans(longest) if plan.weights == "bf16"]


def _widen_eagle(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor of a feature drafter: the map that joins feature and embedding, or a weight of the layer."""
    import torch

    from vivace.checkpoint.widen import widen_parameter

    if name == "join":
        return torch.cat([half.repeat(k, k) / k for half in value.chunk(2, 1)], 1)
    return widen_parameter(name.removeprefix("body."), value, config, k)


EAGLE = MethodSpec(
    name="eagle",
    summary="a one-layer decoder drafts by predicting features",
    make=_eagle,
    adapter="eagle",
    stored=_feature_drafter,
    training="beside",
    plans=_eagle_plans,
    widen=_widen_eagle,
)

"""Spec of Medusa: further heads on the final residual draft a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _medusa(context: MethodContext) -> Drafter:
    from vivace.methods.medusa.drafter import Medusa

    weights, plan = context.trained()
    return Medusa(context.model, weights, with_length(plan, context.length), context.vocabulary(plan.vocabulary))


def _heads() -> Stored:
    from vivace.decode.tree import TreePlan
    from vivace.methods.medusa.drafter import MedusaConfig, MedusaHeads
    from vivace.methods.medusa.objective import MedusaLoss, MedusaObjective

    return Stored(
        MedusaConfig,
        TreePlan,
        MedusaHeads,
        "heads",
        objective=MedusaObjective,
        loss=MedusaLoss,
        trained_plan=lambda: TreePlan((1,) * 4),
        deepest="heads",
    )


def _medusa_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import DraftPlan, draft_plans
    from vivace.decode.tree import TreePlan

    heads = config().get("heads", longest)
    plans = draft_plans(longest)
    fit = [plan.widths for plan in plans if len(plan.widths) <= heads and plan == DraftPlan(plan.widths)]
    sparse = [TreePlan((5, 4, 3, 2, 2, 1, 1, 1)[:heads], nodes) for nodes in (4, 8, 12, 16, 24)]
    return [*map(TreePlan, fit), *sparse]


def _widen_medusa(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor of Medusa's heads, (heads, out, E)."""
    return (value.repeat(1, 1, k) if name == "output" else value.repeat(1, k, k)) / k


MEDUSA = MethodSpec(
    name="medusa",
    summary="further heads on the final residual draft a tree",
    make=_medusa,
    adapter="medusa",
    stored=_heads,
    training="beside",
    plans=_medusa_plans,
    widen=_widen_medusa,
)

"""Spec of UNO: the model with low-rank deltas drafts a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, draft_head, widen_low_rank, with_length

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _uno(context: MethodContext) -> Drafter:
    from vivace.methods.uno.drafter import Uno

    weights, plan = context.trained()
    return Uno(context.model, weights, with_length(plan, context.length), draft_head(context, plan))


def _block_deltas() -> Stored:
    from vivace.decode.tree import TreePlan
    from vivace.methods.uno.drafter import UnoConfig, UnoDeltas
    from vivace.methods.uno.objective import UnoLoss, UnoObjective

    return Stored(
        UnoConfig,
        TreePlan,
        UnoDeltas,
        "low-rank deltas that draft a block",
        objective=UnoObjective,
        loss=UnoLoss,
        trained_plan=lambda: TreePlan((1,) * 4),
        deepest="block",
    )


def _uno_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.tree import TreePlan

    block = min(config().get("block", longest), longest)
    chains = [TreePlan((1,) * length) for length in range(1, block + 1)]
    trees = [TreePlan((1, 4, 3, 2, 2, *[2] * block)[:block], nodes) for nodes in (4, 8, 12, 16, 24)]
    return [*chains, *trees]


UNO = MethodSpec(
    name="uno",
    summary="the model with low-rank deltas drafts a block in one pass",
    make=_uno,
    adapter="uno",
    stored=_block_deltas,
    training="beside",
    plans=_uno_plans,
    widen=widen_low_rank,
)

"""What lists of methods know about the toy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _drafter(context: MethodContext) -> Drafter:
    from tests.methods.bigram.drafter import BigramDrafter

    weights, plan = context.trained()
    return BigramDrafter(weights, with_length(plan, context.length))


def _table() -> Stored:
    from tests.methods.bigram.drafter import BigramConfig, BigramObjective, BigramTable
    from vivace.decode.shallow import DraftPlan

    return Stored(BigramConfig, DraftPlan, BigramTable, "a table of followers", objective=BigramObjective)


def _plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import DraftPlan

    return [DraftPlan.chain(length) for length in range(1, longest + 1)]


def _widen(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    return value.clone()


BIGRAM = MethodSpec(
    name="bigram",
    summary="the likeliest follower of each token drafts",
    make=_drafter,
    adapter="bigram",
    stored=_table,
    training="beside",
    plans=_plans,
    widen=_widen,
)

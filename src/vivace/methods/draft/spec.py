"""Spec of drafting with a second, smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _draft(context: MethodContext) -> Drafter:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.draft.drafter import DraftModel, DraftModelConfig

    smaller = context.draft_model()
    default = DraftPlan.chain(DraftModelConfig().num_draft_tokens)
    length = len(context.planned(default)[1].widths) if context.length is None else context.length
    return DraftModel(smaller, context.model.config.vocab_size, DraftModelConfig(num_draft_tokens=length))


def _draft_plan() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.draft.drafter import DraftModelConfig

    return Stored(DraftModelConfig, DraftPlan, None, "a second, smaller model")


def _chains(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import DraftPlan

    return [DraftPlan.chain(length) for length in range(1, longest + 1)]


DRAFT = MethodSpec(
    name="draft",
    summary="a second, smaller model drafts",
    make=_draft,
    stored=_draft_plan,
    needs_draft_model=True,
    runs_on_ranks=True,
    is_tried_by_auto=True,
    training="beside",
    plans=_chains,
    keeps_plan=False,
)

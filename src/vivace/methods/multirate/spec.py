"""Specs of self-speculation with the accelerated residual, alone and after prompt lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import (
    MethodContext,
    MethodSpec,
    Stored,
    draft_head,
    draft_shapes,
    widen_low_rank,
    with_length,
)

if TYPE_CHECKING:
    from vivace.core.seams import Drafter
    from vivace.decode.lookup import PromptLookup


def _multirate(context: MethodContext, lookup: PromptLookup | None = None) -> Drafter:
    from vivace.methods.multirate.drafter import AcceleratedGuess, drafter_by

    weights, plan = context.trained()
    guess = context.shared("accelerated guess", lambda: AcceleratedGuess(context.model, weights))
    return drafter_by(guess, with_length(plan, context.length), lookup=lookup, head=draft_head(context, plan))


def _multirate_with_lookup(context: MethodContext) -> Drafter:
    from vivace.decode.lookup import LookupConfig, PromptLookup

    config = LookupConfig() if context.length is None else LookupConfig(num_draft_tokens=context.length)
    return _multirate(context, PromptLookup(config))


def _accelerator() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.multirate.config import MultirateConfig
    from vivace.methods.multirate.residual import Accelerator

    return Stored(MultirateConfig, DraftPlan, Accelerator, "an accelerator")


MULTIRATE = MethodSpec(
    name="multirate",
    summary="an accelerated residual drafts (M2R2)",
    make=_multirate,
    adapter="multirate",
    stored=_accelerator,
    is_tried_by_auto=True,
    training="beside",
    plans=draft_shapes,
    widen=widen_low_rank,
)

MULTIRATE_LOOKUP = MethodSpec(
    name="multirate+lookup",
    summary="prompt lookup where it finds something, else the accelerated residual",
    make=_multirate_with_lookup,
    adapter="multirate",
)

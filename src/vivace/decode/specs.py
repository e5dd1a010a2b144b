"""Specs of the methods without trained weights of their own: plain decoding, lookup, a draft model, and ``auto``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.decode.spec import DRAFTS_NOTHING, ConfigReader, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _auto(context: MethodContext) -> Drafter:
    from vivace.decode.adaptive import Adaptive

    plain, tried = context.drafters()
    return Adaptive(tried, plain=plain)


def _plain(context: MethodContext) -> Drafter:
    from vivace.decode.plain import RunsAhead

    return RunsAhead(context.model)


def _lookup(context: MethodContext) -> Drafter:
    from vivace.decode.lookup import LookupConfig, PromptLookup

    return PromptLookup(LookupConfig() if context.length is None else LookupConfig(num_draft_tokens=context.length))


def _draft(context: MethodContext) -> Drafter:
    from vivace.decode.draft_model import DraftModel, DraftModelConfig
    from vivace.decode.shallow import DraftPlan

    smaller = context.draft_model()
    default = DraftPlan.chain(DraftModelConfig().num_draft_tokens)
    length = len(context.planned(default)[1].widths) if context.length is None else context.length
    return DraftModel(smaller, context.model.config.vocab_size, DraftModelConfig(num_draft_tokens=length))


def _draft_plan() -> Stored:
    from vivace.decode.draft_model import DraftModelConfig
    from vivace.decode.shallow import DraftPlan

    return Stored(DraftModelConfig, DraftPlan, None, "a second, smaller model")


def _chains(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import DraftPlan

    return [DraftPlan.chain(length) for length in range(1, longest + 1)]


AUTO = MethodSpec(
    name="auto",
    summary="measure on this machine and take what is fastest",
    make=_auto,
    no_length="finds out how far to draft",
)
PLAIN = MethodSpec(name="plain", summary="one token per pass", make=_plain, no_length=DRAFTS_NOTHING)
LOOKUP = MethodSpec(
    name="lookup", summary="draft what followed the same words before", make=_lookup, is_tried_by_auto=True
)
DRAFT = MethodSpec(
    name="draft",
    summary="a second, smaller model drafts",
    make=_draft,
    stored=_draft_plan,
    needs_draft_model=True,
    is_tried_by_auto=True,
    training="beside",
    plans=_chains,
    keeps_plan=False,
)

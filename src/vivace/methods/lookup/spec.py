"""Spec of prompt lookup, whose drafter other methods use too (``vivace.decode.lookup``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import MethodContext, MethodSpec

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _lookup(context: MethodContext) -> Drafter:
    from vivace.decode.lookup import LookupConfig, PromptLookup

    config = LookupConfig() if context.length is None else LookupConfig(num_draft_tokens=context.length)
    return PromptLookup(config, context.model)


LOOKUP = MethodSpec(
    name="lookup",
    summary="draft what followed the same words before",
    make=_lookup,
    runs_on_ranks=True,
    is_tried_by_auto=True,
)

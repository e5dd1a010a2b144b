"""Spec of SkipDecode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _skipdecode(context: MethodContext) -> Drafter:
    from vivace.methods.skipdecode.drafter import SkipDecode

    _, plan = context.planned(None)
    return SkipDecode(context.model) if plan is None else SkipDecode(context.model, plan)


def _schedule() -> Stored:
    from vivace.methods.skipdecode.drafter import SkipPlan

    return Stored(dict, SkipPlan, None, "a schedule")


SKIPDECODE = MethodSpec(
    name="skipdecode",
    summary="later tokens skip more of the middle layers",
    make=_skipdecode,
    stored=_schedule,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    training="whole",
)

"""Spec of Lookahead decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _lookahead(context: MethodContext) -> Drafter:
    from dataclasses import replace

    from vivace.methods.lookahead.drafter import Lookahead, LookaheadPlan

    _, plan = context.planned(LookaheadPlan())
    return Lookahead(context.model, plan if context.length is None else replace(plan, ngram=context.length + 1))


def _three_numbers() -> Stored:
    from vivace.methods.lookahead.drafter import LookaheadPlan

    return Stored(dict, LookaheadPlan, None, "a plan")


def _lookahead_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.methods.lookahead.drafter import LookaheadPlan

    sizes = ((3, 3), (5, 5), (7, 3))
    return [LookaheadPlan(n, window, guesses) for n in range(3, min(6, longest + 2)) for window, guesses in sizes]


LOOKAHEAD = MethodSpec(
    name="lookahead",
    summary="draft n-grams from a Jacobi iteration",
    make=_lookahead,
    stored=_three_numbers,
    plans=_lookahead_plans,
)

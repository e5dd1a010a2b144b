"""Spec of plain decoding, whose code is part of the loop (``vivace.decode.plain``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _plain(context: MethodContext) -> Drafter:
    from vivace.decode.multi_step import MultiStepPlain

    return MultiStepPlain(context.model)


PLAIN = MethodSpec(
    name="plain", summary="one token per pass", make=_plain, no_length=DRAFTS_NOTHING, runs_on_ranks=True
)

"""Specs of CALM and LITE: tokens exit early where they are confident."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _calm(context: MethodContext) -> Drafter:
    from vivace.methods.confidence.drafter import ConfidentDepth

    return ConfidentDepth("calm", *context.trained(), context.quality)


def _lite(context: MethodContext) -> Drafter:
    from vivace.methods.confidence.drafter import ConfidentDepth

    return ConfidentDepth("lite", *context.trained(), context.quality)


def _thresholds() -> Stored:
    from vivace.methods.confidence.drafter import Confidence, ConfidenceConfig, ConfidencePlan

    return Stored(ConfidenceConfig, ConfidencePlan, Confidence, "thresholds", is_float32=True)


CALM = MethodSpec(
    name="calm",
    summary="leave early by confidence",
    make=_calm,
    adapter="calm",
    stored=_thresholds,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    has_quality=True,
    training="beside",
)

LITE = MethodSpec(
    name="lite",
    summary="leave early by a fine-tuned model's own probability",
    make=_lite,
    adapter="lite",
    stored=_thresholds,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    has_quality=True,
    training="beside",
)

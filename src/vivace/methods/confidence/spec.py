"""Specs of CALM and LITE: tokens exit early where they are confident."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _thresholds() -> Stored:
    from vivace.methods.confidence.drafter import Confidence, ConfidenceConfig, ConfidencePlan

    return Stored(ConfidenceConfig, ConfidencePlan, Confidence, "thresholds", is_float32=True)


def _spec(name: str, summary: str) -> MethodSpec:
    """Return the spec of a method whose tokens exit where they are confident; its weights have its name."""

    def make(context: MethodContext) -> Drafter:
        from vivace.methods.confidence.drafter import ConfidentDepth

        return ConfidentDepth(name, *context.trained(), context.quality)

    return MethodSpec(
        name=name,
        summary=summary,
        make=make,
        adapter=name,
        stored=_thresholds,
        lossless=False,
        no_length=DRAFTS_NOTHING,
        has_quality=True,
        training="beside",
    )


CALM = _spec("calm", "exit early where the model is confident")
LITE = _spec("lite", "exit early by the probability of a model fine-tuned for it")

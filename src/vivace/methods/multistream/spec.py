"""Spec of speculative streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, draft_head, widen_low_rank, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _drafter(context: MethodContext) -> Drafter:
    from vivace.methods.multistream.drafter import StreamDrafter

    weights, plan = context.trained()
    return StreamDrafter(context.model, weights, with_length(plan, context.length), draft_head(context, plan))


def _streams() -> Stored:
    from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
    from vivace.methods.multistream.streams import Streams

    return Stored(MultistreamConfig, StreamPlan, Streams, "speculative streams")


def _plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.configuration import build
    from vivace.methods.multistream.config import MultistreamConfig, plans_to_try

    return [plan for plan in plans_to_try(build(MultistreamConfig, config())) if len(plan.widths) <= longest]


def _widen(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor of speculative streams; ranks do not change."""
    if name == "embeddings":
        return value.repeat(1, k)
    if name == "pruner.down":
        return value.repeat(1, k) / k
    if name in ("final", "decided", "rotation.values"):
        return value.repeat(1, k, k) / k
    return value.repeat(k, 1) if name == "pruner.up" else widen_low_rank(name, value, config, k)


MULTISTREAM = MethodSpec(
    name="multistream",
    summary="speculative streams draft and verify in one pass",
    make=_drafter,
    adapter="multistream",
    stored=_streams,
    training="beside",
    plans=_plans,
    widen=_widen,
)

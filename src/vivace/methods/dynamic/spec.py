"""Spec of dynamic depth: tokens exit early where a router of the accelerated residual is confident."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored, widen_low_rank

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _dynamic(context: MethodContext) -> Drafter:
    from vivace.methods.dynamic.drafter import DynamicDepth

    exits, plan = context.trained()
    exits.gates.to(context.model.dtype)
    return DynamicDepth(exits, plan, context.quality)


def _exits() -> Stored:
    from vivace.decode.depth import ExitPlan
    from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights

    return Stored(DynamicConfig, ExitPlan, DynamicWeights, "gates and a router", is_float32=True)


def _widen_exits(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor of gates or their router, whose latents keep their width."""
    if name.startswith("gates."):
        part = name.removeprefix("gates.")
        return value.repeat(1, k) if part.endswith("scale") else widen_low_rank(part, value, config, k)
    if name.startswith("router.inner."):
        return value.repeat(k, 1) / k
    return value.repeat(1, k, 1) / k if name.startswith("router.down.") else value.clone()


def _exits_have_twin(config: Mapping[str, Any]) -> bool:
    """Return whether the weights can be widened: a linear router reads rows of the model's width under an ambiguous
    name.
    """
    return config["router"]["kind"] in ("arla", "mlp")


DYNAMIC = MethodSpec(
    name="dynamic",
    summary="exit early where a router of the accelerated residual is confident",
    make=_dynamic,
    adapter="dynamic",
    stored=_exits,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    has_quality=True,
    training="beside",
    widen=_widen_exits,
    has_twin=_exits_have_twin,
)

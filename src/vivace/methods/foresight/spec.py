"""Spec of foresight: plain decoding that prefetches experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored, widen_low_rank

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _foresight(context: MethodContext) -> Drafter:
    from vivace.storage.experts.foresight.drafter import ForesightDrafter

    return ForesightDrafter(*context.trained())


def _foresight_weights() -> Stored:
    from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
    from vivace.storage.experts.foresight.weights import Foresight

    return Stored(ForesightConfig, ForesightPlan, Foresight, "foresight")


def _widen_foresight(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor: scales (N, E) are per layer and component, the routers' factors are (..., X, E)."""
    import torch

    if name in ("near", "far"):
        return value.repeat(*(1,) * (value.dim() - 1), k) / k
    if name.startswith("forecast."):
        joined = name == "forecast.down"  # of a residual and an embedding
        return torch.cat([half.repeat(1, k) / k for half in value.chunk(2, 1)], 1) if joined else value.clone()
    return value.repeat(1, k) if name.endswith("scale") else widen_low_rank(name, value, config, k)


FORESIGHT = MethodSpec(
    name="foresight",
    summary="plain decoding that predicts which experts come next",
    make=_foresight,
    adapter="foresight",
    stored=_foresight_weights,
    no_length=DRAFTS_NOTHING,
    training="beside",
    widen=_widen_foresight,
)

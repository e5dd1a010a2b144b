"""Specs of what the accelerated residual serves: self-speculation, early exits, and experts loaded ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vivace.decode.spec import DRAFTS_NOTHING, ConfigReader, MethodContext, MethodSpec, Stored, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter
    from vivace.decode.lookup import PromptLookup


def _multirate(context: MethodContext, lookup: PromptLookup | None = None) -> Drafter:
    from vivace.multirate.drafter import AcceleratedGuess, drafter_by

    weights, plan = context.trained()
    guess = context.shared("accelerated guess", lambda: AcceleratedGuess(context.model, weights))
    return drafter_by(guess, with_length(plan, context.length), lookup=lookup)


def _multirate_with_lookup(context: MethodContext) -> Drafter:
    from vivace.decode.lookup import LookupConfig, PromptLookup

    config = LookupConfig() if context.length is None else LookupConfig(num_draft_tokens=context.length)
    return _multirate(context, PromptLookup(config))


def _accelerator() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.multirate.config import MultirateConfig
    from vivace.multirate.residual import Accelerator

    return Stored(MultirateConfig, DraftPlan, Accelerator, "an accelerator")


def _plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import draft_plans

    return draft_plans(longest)


def _widen_accelerator(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    from vivace.checkpoint.widen import widen_low_rank

    return widen_low_rank(name, value, config, k)


def _dynamic(context: MethodContext) -> Drafter:
    from vivace.multirate.dynamic import DynamicDepth

    exits, plan = context.trained()
    exits.gates.to(context.model.dtype)
    return DynamicDepth(exits, plan, context.quality)


def _exits() -> Stored:
    from vivace.multirate.dynamic import DynamicConfig, DynamicPlan, DynamicWeights

    return Stored(DynamicConfig, DynamicPlan, DynamicWeights, "gates and a router", is_float32=True)


def _widen_exits(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of gates and their router, whose latents stay as wide as they are."""
    if name.startswith("gates."):
        return _widen_foresight(name.removeprefix("gates."), value, config, k)
    if name.startswith("router.inner."):
        return value.repeat(k, 1) / k
    return value.repeat(1, k, 1) / k if name.startswith("router.down.") else value.clone()


def _exits_have_twin(config: Mapping[str, Any]) -> bool:
    """A linear router reads rows of the model's width under a name that others have too."""
    return config["router"]["kind"] in ("arla", "mlp")


def _foresight(context: MethodContext) -> Drafter:
    from vivace.multirate.foreseeing import Foreseeing

    return Foreseeing(*context.trained())


def _foresight_weights() -> Stored:
    from vivace.multirate.foresight import Foresight, ForesightConfig, ForesightPlan

    return Stored(ForesightConfig, ForesightPlan, Foresight, "foresight")


def _widen_foresight(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of foresight: scales (N, E) are per layer and component, routers' parts (..., X, E)."""
    import torch

    if name in ("near", "far"):
        return value.repeat(*(1,) * (value.dim() - 1), k) / k
    if name.startswith("forecast."):
        joined = name == "forecast.down"  # of a residual and an embedding
        return torch.cat([half.repeat(1, k) / k for half in value.chunk(2, 1)], 1) if joined else value.clone()
    return value.repeat(1, k) if name.endswith("scale") else _widen_accelerator(name, value, config, k)


MULTIRATE = MethodSpec(
    name="multirate",
    summary="the accelerated residual drafts (M2R2)",
    make=_multirate,
    adapter="multirate",
    stored=_accelerator,
    is_tried_by_auto=True,
    training="beside",
    plans=_plans,
    widen=_widen_accelerator,
)
MULTIRATE_LOOKUP = MethodSpec(
    name="multirate+lookup",
    summary="look up first, else the accelerated residual",
    make=_multirate_with_lookup,
    adapter="multirate",
)
DYNAMIC = MethodSpec(
    name="dynamic",
    summary="leave early where the accelerated residual is sure",
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
FORESIGHT = MethodSpec(
    name="foresight",
    summary="plain decoding that tells which experts will be needed",
    make=_foresight,
    adapter="foresight",
    stored=_foresight_weights,
    no_length=DRAFTS_NOTHING,
    training="beside",
    widen=_widen_foresight,
)

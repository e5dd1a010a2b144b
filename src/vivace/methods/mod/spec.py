"""Spec of Mixture-of-Depths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import DRAFTS_NOTHING, MethodContext, MethodSpec, Stored

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _mod(context: MethodContext) -> Drafter:
    from vivace.methods.mod.drafter import MixtureOfDepths

    return MixtureOfDepths(*context.trained())


def _depth_routers() -> Stored:
    from vivace.methods.mod.drafter import DepthRouters, ModConfig, ModPlan

    what = "routers, and a model that was fine-tuned for them,"
    return Stored(ModConfig, ModPlan, DepthRouters, what, is_float32=True)


MOD = MethodSpec(
    name="mod",
    summary="routers let some tokens skip every second layer (Mixture-of-Depths)",
    make=_mod,
    adapter="mod",
    stored=_depth_routers,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    training="whole",
)

"""A tiny checkpoint on which every method of the table can run, with random weights for those that need some."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.files import OWN_DRAFT
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.core.model import Decoder
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.engine import Engine
from vivace.methods.composition import stored_of
from vivace.methods.confidence.drafter import Confidence, ConfidenceConfig, ConfidencePlan
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig
from vivace.methods.eagle.drafter import EagleConfig, EagleLayer
from vivace.methods.early_exit.drafter import Exit, ExitConfig
from vivace.methods.medusa.drafter import MedusaConfig, MedusaHeads
from vivace.methods.mod.drafter import DepthRouters, ModConfig, ModPlan
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.residual import Accelerator
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.streams import Streams
from vivace.methods.spec import Plan
from vivace.methods.table import METHODS
from vivace.methods.uno.drafter import UnoConfig, UnoDeltas
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
from vivace.storage.experts.foresight.weights import Foresight

LAYERS = 6
OF_MIXTURES = ("foresight",)
"""Methods that need a mixture of experts."""
QUICK = ("plain", "multirate", "multistream", "eagle")
"""Methods whose drafts are made in different ways, and which are enough where all of them take long."""
NOT_QUICK = pytest.mark.slow_where(lambda method, **_: method not in QUICK)


def not_quick_on_pytorch(dtype: str) -> pytest.MarkDecorator:
    """The others are slow in float32, the parameter of this name: their sessions are those of bfloat16."""
    return pytest.mark.slow_where(lambda method, **others: others[dtype] == "float32" and method not in QUICK)


def few_draw(parameter: str, drawn: Any) -> pytest.MarkDecorator:
    """Drawn texts (this parameter, this value) are slow for all but methods that draft in ways of their own."""
    return pytest.mark.slow_where(
        lambda method, **others: others[parameter] == drawn and method not in (*QUICK, "draft")
    )


_STREAMS = MultistreamConfig(streams=3, insertion_layer=3, rank=4, bottleneck=8, feedback=True)
_GATES = DynamicConfig(GatesConfig((GateConfig(2), GateConfig(4)), rank=2, bottleneck=4), RouterConfig(latent=4))
_LEAVING = ConfidenceConfig((2, 4))
_SURE = ConfidencePlan((ExitThresholds(0.98, (0.5, 0.5)),), "deferred")
ADAPTERS: Mapping[str, tuple[Any, Any, Any, float]] = {
    "multirate": (Accelerator, MultirateConfig(2, rank=4, bottleneck=8, feedback=True), DraftPlan.chain(3), 0.02),
    "multistream": (Streams, _STREAMS, StreamPlan((1, 1, 1), "kept"), 0.02),
    "dynamic": (DynamicWeights, _GATES, ExitPlan((ExitThresholds(0.98, (0.5, 0.5)),)), 0.1),
    "medusa": (MedusaHeads, MedusaConfig(3), TreePlan((2, 1, 1)), 0.02),
    "eagle": (EagleLayer, EagleConfig(), DraftPlan.chain(3), 0.02),
    "deed": (Exit, ExitConfig(2, 8), DraftPlan.chain(3), 0.02),
    "uno": (UnoDeltas, UnoConfig(4, 4), TreePlan((1, 1, 1, 1)), 0.02),
    "calm": (Confidence, _LEAVING, _SURE, 0.0),
    "lite": (Confidence, ConfidenceConfig((2, 4), "probability"), _SURE, 0.0),
    "mod": (DepthRouters, ModConfig(), ModPlan((0.0,) * (LAYERS // 2)), 0.3),
    "foresight": (Foresight, ForesightConfig(rank=2, bottleneck=8, forecast=6), ForesightPlan(3, (1,)), 0.05),
}
"""By method: weights, their configuration, the plan, and the noise that is added to untrained ones.

A method that is not here has the configuration and the plan that its spec begins with."""


def make_model(folder: Path, method: str, *, context: int = 512) -> Path:
    """A checkpoint with whatever the method needs beside it, made once a folder."""
    base = folder / ("mixture" if method in OF_MIXTURES else "dense")
    if not base.exists() and method in OF_MIXTURES:
        dense = make_checkpoint(folder / "few", layers=LAYERS, context=context)
        upcycle_checkpoint(dense, base, num_experts=8, noise=0.5)
    elif not base.exists():
        make_checkpoint(base, layers=LAYERS, context=context)
    if method == "draft" and not (base / OWN_DRAFT).exists():
        make_checkpoint(base / OWN_DRAFT, layers=LAYERS, context=context)  # a twin: always right
    kind = "multirate" if method == "auto" else METHODS[method].adapter
    if kind is not None and not (base / "adapters" / kind).exists() and stored_of(kind).weights is None:
        stored = stored_of(kind)
        plan = asdict((stored.trained_plan or stored.plan)())
        save_adapter(base / "adapters" / kind, kind, base_hash(base), plan, asdict(stored.config()), {})
    elif kind is not None and not (base / "adapters" / kind).exists():
        weights, plan = make_weights(kind, load_decoder(base, dtype="float32"))
        keep_weights(base / "adapters" / kind, kind, base, weights, plan)
    return base


def load_for(folder: Path, method: str, **how: Any) -> Engine:
    """The model that a method runs on, loaded; the test is skipped where the method cannot run on it."""
    engine = vivace.load(make_model(folder, method), **how)
    skip_unless_it_runs(engine, method)
    return engine


def skip_unless_it_runs(engine: Engine, method: str) -> None:
    """Skip a test of a method that cannot run on a model, as with weights or kernels that it is not for."""
    if (reason := METHODS[method].why_not(engine.model)) is not None:
        pytest.skip(f"{method}: {reason}")


def make_weights(kind: str, model: Decoder) -> tuple[Any, Any]:
    """Random weights of a kind for a model, and a plan to use them by."""
    make, config, plan, noise = ADAPTERS.get(kind) or _as_the_spec_begins(kind)
    torch.manual_seed(2)
    weights: nn.Module = make(config, model.config)
    if isinstance(weights, MedusaHeads):
        weights.start_from(model)
    with torch.no_grad():
        for value in (*weights.parameters(), *weights.buffers()):
            if value.is_floating_point():
                value.add_(noise * torch.randn_like(value))
    return weights.requires_grad_(False), plan


def _as_the_spec_begins(kind: str) -> tuple[Any, Any, Any, float]:
    stored = stored_of(kind)
    return stored.weights, stored.config(), stored.plan(), 0.02


def keep_weights(folder: Path, kind: str, base: Path, weights: Any, plan: Any) -> None:
    """Write weights as training writes them."""
    save_adapter(folder, kind, base_hash(base), asdict(plan), asdict(weights.config), weights.tensors())


def plans_of(method: str, longest: int = 4) -> dict[str, Plan | None]:
    """One plan of each kind that ``vivace tune`` tries for a method, the largest: chains, trees, in fewer bits.

    Args:
        method: its name.
        longest: guesses in a row at most.

    Returns:
        By kind, which is the plan's label without its numbers; None where a method drafts by no plan.
    """
    spec = METHODS[method]
    if spec.plans is None:
        return {"": None}
    config = ADAPTERS[method][1] if method in ADAPTERS else None
    plans = spec.plans(lambda: {} if config is None else asdict(config), longest)
    return {re.sub(r"[^a-z]+", " ", plan.label.replace("int8", "eight")).strip(): plan for plan in plans}

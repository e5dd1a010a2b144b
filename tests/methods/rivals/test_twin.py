"""Rivals of a wide twin draft what they draft beside the small model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.widen import widen_checkpoint, without_twin
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.decode.tree import TreePlan
from vivace.methods.composition import stored_of, twins
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig, RouterKind
from vivace.methods.medusa.drafter import MedusaConfig, MedusaHeads


@pytest.mark.parametrize("own_output", [True, False])
def test_medusas_heads_are_widened(tmp_path: Path, own_output: bool) -> None:
    base, plan = make_checkpoint(tmp_path / "base"), TreePlan((2, 1))
    model = vivace.load(base, kernels="torch").model
    heads = MedusaHeads(MedusaConfig(heads=2, own_output=own_output), model.config)
    heads.start_from(model)
    torch.manual_seed(1)
    noise = {"mix": 0.3, "output": 0.02}
    tensors = {name: value + noise[name] * torch.randn_like(value) for name, value in heads.tensors().items()}
    folder = base / "adapters" / "medusa"
    save_adapter(folder, "medusa", base_hash(base), asdict(plan), asdict(heads.config), tensors)
    assert without_twin(base, twins()) == ()
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    small, wide = (
        vivace.load(path).generate(["aka", "bob"], method="medusa", max_new_tokens=48, do_sample=False)
        for path in (base, tmp_path / "wide")
    )
    assert sum(sum(answer.stats.accepted_per_position) for answer in small) > 0
    for one, twin in zip(small, wide, strict=True):
        assert one.token_ids == twin.token_ids
        assert one.stats.accepted_per_position == twin.stats.accepted_per_position


@pytest.mark.parametrize("kind", ["deed", "eagle", "uno"])
def test_other_drafters_are_widened(tmp_path: Path, kind: str) -> None:
    base, stored = make_checkpoint(tmp_path / "base", layers=8), stored_of(kind)
    model = vivace.load(base, kernels="torch", dtype="float32").model
    torch.manual_seed(2)
    config, plan = stored.config(), stored.plan()
    weights = stored.weights(config, model.config)
    tensors = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.tensors().items()}
    save_adapter(base / "adapters" / kind, kind, base_hash(base), asdict(plan), asdict(config), tensors)
    assert without_twin(base, twins()) == ()
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    small, wide = (
        vivace.load(path, dtype="float32").generate(
            ["aka", "bob", "the quick fox"], method=kind, max_new_tokens=48, do_sample=False, ignore_eos=True
        )
        for path in (base, tmp_path / "wide")
    )
    assert sum(sum(answer.stats.accepted_per_position) for answer in small) > 0
    for one, twin in zip(small, wide, strict=True):
        assert one.token_ids == twin.token_ids
        assert one.stats.accepted_per_position == twin.stats.accepted_per_position


def test_a_draft_model_goes_along_as_it_is(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    make_checkpoint(base / "draft", layers=1)
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    answers = [
        vivace.load(path).generate("aka", method="draft", max_new_tokens=24)[0] for path in (base, tmp_path / "wide")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.num_draft_tokens == answers[1].stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["arla", "mlp", "linear"])
def test_gates_and_routers_are_widened(tmp_path: Path, kind: RouterKind) -> None:
    """Exits at the same tokens; a linear router goes without a twin."""
    base = make_checkpoint(tmp_path / "base", layers=4)
    model = vivace.load(base, kernels="torch", dtype="float32").model
    config = DynamicConfig(GatesConfig((GateConfig(1), GateConfig(3)), bottleneck=8), RouterConfig(kind, latent=8))
    torch.manual_seed(2)
    weights = DynamicWeights(config, model.config)
    tensors = {name: value + 0.1 * torch.randn_like(value) for name, value in weights.tensors().items()}
    plan = ExitPlan((ExitThresholds(0.98, (0.5, 0.5)),))
    save_adapter(base / "adapters" / "dynamic", "dynamic", base_hash(base), asdict(plan), asdict(config), tensors)
    assert without_twin(base, twins()) == (("dynamic",) if kind == "linear" else ())
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    if kind == "linear":
        assert not (tmp_path / "wide" / "adapters" / "dynamic").exists()
        return
    small, wide = (
        vivace.load(path, dtype="float32").generate(
            ["aka", "bob"], method="dynamic", max_new_tokens=32, do_sample=False, ignore_eos=True
        )
        for path in (base, tmp_path / "wide")
    )
    for one, twin in zip(small, wide, strict=True):
        assert one.token_ids == twin.token_ids
        assert one.stats.exit_layers == twin.stats.exit_layers
    assert len({layer for one in small for layer in one.stats.exit_layers}) > 1, "some leave and some stay"

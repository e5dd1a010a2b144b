"""By which weights ``auto`` tells measurements apart, on engines as users open them."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

import vivace
from tests.every_method import make_model
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import TENSORS
from vivace.methods.auto.drafter import Adaptive
from vivace.methods.table import METHODS


def labels(engine: vivace.Engine) -> dict[str, str]:
    auto = engine.methods.drafter("auto")
    assert isinstance(auto, Adaptive)
    return {drafter.name: label for drafter, label in zip(auto.drafters, auto._labels, strict=True)}


def test_weights_that_are_trained_again_and_another_draft_model_are_others(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "multirate")
    again = tmp_path / "again"
    shutil.copytree(folder / "adapters" / "multirate", again)
    tensors = load_file(again / TENSORS)
    save_file({name: tensor + 0.25 for name, tensor in tensors.items()}, again / TENSORS, metadata={"format": "pt"})
    first, same = labels(vivace.load(folder)), labels(vivace.load(folder))
    second = labels(vivace.load(folder, adapters={"again": again}))
    assert first == same
    assert first["multirate"] != second["multirate"]
    assert first["lookup"] == second["lookup"] == labels(vivace.load(folder))["lookup"]
    drafts = [make_checkpoint(tmp_path / f"draft{seed}", seed=seed) for seed in (1, 2)]
    named = [labels(vivace.load(folder, draft_model=draft))["draft"] for draft in drafts]
    assert named[0] != named[1]
    assert METHODS["draft"].needs_draft_model

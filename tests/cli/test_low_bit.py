"""Weights in few bits on the command line: the same text by every method, sizes told, quality beside what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Outcome
from tests.tiny_checkpoints import make_checkpoint

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("low-bit"), context=512, layers=2)


def test_evaluate_puts_formats_side_by_side(cli: Cli, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt": "Write SQL for: {c}", "reference": "a b c {c}", "task": "wikisql"}}\n' for c in "xyz")
    )
    words = ("evaluate", folder, "--prompts", prompts, "--max-new-tokens", 6)
    report = cli(*words, "--json").json
    assert report["setting"]["prompts"] == "prompts.jsonl"
    assert report["provenance"]["packages"]["torch"] == torch.__version__
    stored, eight, four = report["weights"]
    assert [one["weights"] for one in report["weights"]] == ["bf16", "int8", "q4"]
    assert stored["num_bytes"] > eight["num_bytes"] > four["num_bytes"]
    assert stored["identical_share"] == 1.0
    assert stored["agreement"] > 0.9
    assert abs(eight["reference_nll"] - stored["reference_nll"]) < 0.05
    assert stored["tasks"]["wikisql"]["num_texts"] == report["setting"]["num_prompts"] == 3
    shown = cli(*words, "--weights", "q4")
    assert "exact match" in shown.out
    assert "int8" not in shown.out
    assert "did you mean 'int8'" in cli(*words, "--weights", "int9").err


@pytest.mark.parametrize("weights", ["int8", "q4", "lut4", "lut3", "lut2", "exact12"])
def test_every_method_says_the_same(cli: Cli, folder: Path, weights: str) -> None:
    words = ("--weights", weights, "--dtype", "bfloat16", "--limit", 2, "--max-new-tokens", 10)
    outcome = cli("check", folder, "--methods", "lookup", *words)
    assert outcome.status == 0, outcome.err
    assert "lookup: identical: yes (2 of 2 answers)" in outcome.out


def test_twelve_bits_are_the_model(cli: Cli, folder: Path) -> None:
    """The text of bfloat16 in three quarters of the bytes; other dtypes are refused in a line."""
    import vivace

    stored, kept = (vivace.load(folder, dtype="bfloat16", weights=weights) for weights in ("bf16", "exact12"))
    answers = [
        [one.token_ids for one in engine.generate(["a b c", "d"], max_new_tokens=20)] for engine in (stored, kept)
    ]
    assert answers[0] == answers[1]
    told = cli("inspect", folder, "--weights", "exact12", "--json").json["bytes_in_memory"]
    assert told <= kept.num_bytes
    whole, packed = (vivace.load(weights=weights).num_bytes for weights in ("bf16", "exact12"))  # no tiny matrices
    assert packed < 0.8 * whole
    outcome = cli("generate", "--model", folder, "--weights", "exact12", "--dtype", "float32", "a")
    assert outcome.status != 0
    assert "this model's are float32; give --dtype bfloat16" in outcome.err


def test_sizes_are_told(cli: Cli, folder: Path) -> None:
    formats = ("bf16", "int8", "q4", "lut4", "lut3", "lut2")
    facts = {name: cli("inspect", folder, "--weights", name, "--json").json for name in formats}
    assert facts["bf16"]["bytes_in_memory"] == 2 * facts["bf16"]["parameters"]
    assert facts["q4"]["weights"] == "q4"
    import vivace

    for name, found in facts.items():
        assert found["bytes_in_memory"] == vivace.load(folder, weights=name, dtype="bfloat16").num_bytes
    assert "of q4 weights" in cli("doctor", folder, "--weights", "q4").out


def test_evaluate_beside_a_full_reading(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """Pruned prompts are answered and scored; what is only known of a full reading is left out."""
    prompts = tmp_path / "long.jsonl"
    row = {"prompt": "where is the key " * 12, "reference": ["the key", "under it"], "task": "multidoc"}
    prompts.write_text(json.dumps(row) + "\n", encoding="utf-8")
    words = ("evaluate", folder, "--prompts", prompts, "--max-new-tokens", 6, "--weights", "bf16")
    [full] = cli(*words, "--json").json["weights"]
    assert set(full["tasks"]["multidoc"]) == {"num_texts", "contains", "f1"}
    pruned = (*words, "--prefill", "random", "--min-prompt", 2, "--keep", "0:0.1")
    [found] = cli(*pruned, "--json").json["weights"]
    assert (found["agreement"], found["reference_nll"]) == (None, None)
    assert found["identical_share"] < 1 == full["identical_share"]
    assert "contain an answer" in cli(*pruned).out
    assert "keep has no effect on prefill full" in cli(*words, "--keep", "fast").err

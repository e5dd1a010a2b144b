"""Plans play in turns, half leave each round, the winner is kept in the adapter and nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_checkpoint
from vivace import tuning
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.cli.app import run
from vivace.decode.shallow import DraftPlan, draft_plans
from vivace.errors import ConfigError
from vivace.evaluate import benchmark
from vivace.evaluate.benchmark import BenchmarkPrompt, Record, Trial
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.residual import Accelerator
from vivace.tuning import candidates_of, search

CHAIN_4 = {"widths": (1, 1, 1, 1), "min_confidence": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an untrained accelerator."""
    place = make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)
    config = MultirateConfig(exit_layer=2, rank=0, bottleneck=8)
    accelerator = Accelerator(config, vivace.load(place).model.config)
    tensors = {name: value.to(torch.float32) for name, value in accelerator.tensors().items()}
    written = {"exit_layer": 2, "mode": "delta", "rank": 0, "bottleneck": 8, "feedback": False}
    save_adapter(place / "adapters" / "multirate", "multirate", base_hash(place), CHAIN_4, written, tensors)
    return place


def questions(engine: vivace.Engine, count: int) -> list[BenchmarkPrompt]:
    return [
        BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in ("aka", "kab", "bak")[:count]
    ]


def test_the_candidates_are_different_plans_within_the_limit(folder: Path) -> None:
    plans = draft_plans(3)
    assert len(set(plans)) == len(plans) > 5
    assert max(len(plan.widths) for plan in plans) == 3
    assert {plan.label for plan in plans} >= {"chain 1", "chain 3", "tree 2-2-1"}
    assert DraftPlan.chain(4).label != DraftPlan((1,) * 4, 0.5).label == "chain 4 if >= 0.5"
    assert DraftPlan((1,) * 3, weights="q4").label == "chain 3 in q4"
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        candidates_of(vivace.load(folder), "multirate", 0)


def test_half_of_the_plans_leave_each_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted contest: longer chains are faster, so the three longest have to be left."""

    def play(
        players: Sequence[Any], asked: Sequence[BenchmarkPrompt], *, batch_size: int, repeats: int
    ) -> list[Record]:
        assert players[0].name == "plain"
        return [Record(player.name, [[trial(player)] * repeats for _ in asked]) for player in players]

    def trial(player: Any) -> Trial:
        speed = 1 if player.name == "plain" else int(player.name.split()[1])
        return Trial(((1, 2, 3),), 1, decode_s=2 / speed, total_s=1.0)

    monkeypatch.setattr(tuning, "run_benchmark", play)
    rounds: list[tuple[int, int]] = []
    engine = vivace.load(folder)
    plans = [DraftPlan.chain(length) for length in (2, 7, 1, 8, 3, 6, 5, 4)]
    asked = questions(engine, 1) * 40
    found = search(engine, "multirate", plans, asked, on_round=lambda *counts: rounds.append(counts))
    assert rounds == [(8, 8), (4, 16), (3, 40)]
    assert [len(trial.plan.widths) for trial in found] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [trial.num_prompts for trial in found] == [40, 40, 40, 16, 8, 8, 8, 8]
    assert found[0].run.speedup == 8


@pytest.mark.parametrize("has_own", [False, True])
def test_a_plan_is_drafted_by_where_a_lora_is_worn(folder: Path, tmp_path: Path, has_own: bool) -> None:
    lora = make_lora(tmp_path / "sql", folder, size=0.05)
    if has_own:
        shutil.copytree(folder / "adapters" / "multirate", lora / "drafting" / "multirate")
    engine = vivace.load(folder, kernels="torch", adapters={"sql": lora})
    asked: dict[str, Any] = {"method": "multirate", "max_new_tokens": 6, "ignore_eos": True, "adapter": "sql"}
    engine.generate("aka", **asked)
    other = tuning.planned(engine, DraftPlan.chain(1))
    (found,) = other.generate("aka", **asked)
    assert found.stats.num_draft_tokens <= len(found.token_ids), "one guess a step, and not the four of the adapter"
    assert other.methods_of("sql").plan == DraftPlan.chain(1)
    assert engine.methods_of("sql").plan is None


def test_every_plan_writes_what_plain_decoding_writes(folder: Path) -> None:
    engine = vivace.load(folder)
    plans = [DraftPlan.chain(1), DraftPlan((2, 1)), DraftPlan.chain(3), DraftPlan((1, 1, 1), 0.9)]
    found = search(engine, "multirate", plans, questions(engine, 3), max_new_tokens=10)
    assert {trial.plan for trial in found} == set(plans)
    assert all(trial.run.identical for trial in found)
    depths = {trial.plan: len(trial.run.acceptance_per_position) for trial in found}
    assert [depths[plan] for plan in plans[:3]] == [1, 2, 3]
    with pytest.raises(ConfigError, match="found 0 plans and 1 prompts"):
        search(engine, "multirate", [], questions(engine, 1))


def test_the_winner_is_written_and_the_weights_stay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "copy"))
    adapter = place / "adapters" / "multirate"
    before = json.loads((adapter / "config.json").read_text())
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    words = ["tune", "--model", str(place), "--limit", "2", "--max-new-tokens", "6", "--longest", "2"]
    assert run([*words, "--no-keep"]) == 0
    assert json.loads((adapter / "config.json").read_text()) == before
    assert "chain 2" in capsys.readouterr().out
    real = benchmark.summarise

    def generous(records: Sequence[Record], baseline: str) -> list[Any]:
        from dataclasses import replace

        return [replace(one, speedup=2.0, tokens_per_s=9.0 + ("tree" in one.method)) for one in real(records, baseline)]

    monkeypatch.setattr(tuning, "summarise", generous)
    assert run(words) == 0
    after = json.loads((adapter / "config.json").read_text())
    assert after["plan"]["widths"] in ([2, 1], [3, 1])
    assert {**after, "plan": before["plan"]} == before
    assert (adapter / "adapter_model.safetensors").read_bytes() == weights


def test_a_method_without_a_draft_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "lookup", "--model", str(folder), "--quiet"]) == 2
    assert "'lookup' has no draft to tune" in capsys.readouterr().err

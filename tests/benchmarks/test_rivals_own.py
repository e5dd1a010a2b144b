"""Rivals on a chat model and the ablation: what is tried for each, and the tables of their files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import vivace
from benchmarks import ablation, rivals_own
from tests.benchmarks.test_chat_tables import MACHINE, run
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli import app
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.methods.multistream.config import StreamPlan
from vivace.prompts import Prompt, save_prompts
from vivace.recipes.own_text import Budget, own_text

STORED = {
    **dict.fromkeys(("multirate", "deed"), DraftPlan((1, 1, 1), weights="q4", vocabulary=8192)),
    "eagle": DraftPlan((1, 1, 1), vocabulary=8192),
    **dict.fromkeys(("medusa", "uno"), TreePlan((1, 1, 1), vocabulary=8192)),
    "multistream": StreamPlan((1, 1, 1), "kept", vocabulary=8192),
    "multistream-every": StreamPlan((1, 1, 1), "every", vocabulary=8192),
}


@pytest.mark.parametrize("system", rivals_own.SYSTEMS)
def test_every_system_gets_as_many_plans_with_its_vocabulary(system: str) -> None:
    stored = asdict(STORED[system]) if system in STORED else {}
    plans: list[Any] = rivals_own.candidates(system, stored)
    assert len(set(plans)) == 4
    assert {plan.vocabulary for plan in plans} == {stored.get("vocabulary", 0)}
    assert all(getattr(plan, "attach", None) == stored.get("attach") for plan in plans)


TINY = {
    "multirate": ("adapter.exit_layer=2", "find_reach=2", "plan.widths=[1,1,1]", "plan.weights=q4"),
    "uno": ("adapter.block=4", "plan.widths=[1,1,1]"),
    "draft": ("layers=[0,3]",),
    "multistream-every": (
        *("adapter.insertion_layer=2", "adapter.pruner_rank=0", "adapter.feedback=false", "adapter.streams=3"),
        *("plan.attach=every", "plan.widths=[1,1,1]"),
    ),
}


def in_bfloat16(folder: Path) -> Path:
    """The same model in the precision that drafts in four bits are for."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


@pytest.mark.slow
def test_a_series_learns_from_one_file_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model: the answers are the same for all, a second call trains nothing, no text differs."""
    model, runs = in_bfloat16(make_checkpoint(tmp_path / "model", layers=4)), tmp_path / "runs"
    monkeypatch.setattr(rivals_own, "SYSTEMS", TINY)
    monkeypatch.setattr(rivals_own, "VOCABULARY", 200)
    monkeypatch.setattr(rivals_own, "SHARED", (*rivals_own.SHARED, "loop.warmup_steps=1"))
    asked = [f"{a}{b}{a}" for a in "abcdef" for b in "klmnop"]
    answers = tmp_path / "own.jsonl"
    own_text(vivace.load(model), answers, Budget(600), 128, asked, lambda _: None)
    rivals_own.train_equally(str(model), answers, runs, 0.02, ())
    assert not list(runs.glob("*/run/own.jsonl"))
    written = {name: (runs / name / "training.json").stat().st_mtime_ns for name in TINY}
    rivals_own.train_equally(str(model), answers, runs, 0.02, ())
    assert written == {name: (runs / name / "training.json").stat().st_mtime_ns for name in TINY}
    assert app.run(["train", "quantized", "--model", str(model), "--out", str(runs / "quantized"), *QUANTIZED]) == 0
    prompts = tmp_path / "prompts.jsonl"
    save_prompts(prompts, [Prompt(text, (), task) for text, task in zip(asked[:6], "ababab", strict=True)])
    given = {"model": str(model), "runs": runs, "prompts": prompts, "tuning": prompts, "limit": 2, "tune_limit": 2}
    given |= {"answers": answers, "max_new_tokens": 12, "repeats": 1, "batch": 1, "temperatures": [0.0]}
    report = rivals_own.measure(argparse.Namespace(**given))
    methods = [run["method"] for run in report["report"][0]["runs"]]
    assert methods[: 1 + len(rivals_own.FREE)] == ["plain", *rivals_own.FREE]
    assert set(methods[1 + len(rivals_own.FREE) :]) == {*TINY, "multirate+lookup"}
    assert not any(run["num_different"] for part in report["report"] for run in part["runs"])
    (tmp_path / "one.json").write_text(json.dumps(report))
    assert "| `multistream-every` |" in rivals_own.tables(tmp_path)


def test_changes_are_for_all_systems_or_for_one_and_stand_behind_their_own() -> None:
    asked = ("longest=512", "multirate:adapter.rank=64", "eagle:adapter.ffn_width=96")
    assert rivals_own._changes("multirate", 2, asked)[-2:] == ["longest=512", "adapter.rank=64"]
    assert rivals_own._changes("medusa", 2, asked)[-2:] == ["plan.vocabulary=8192", "longest=512"]


def test_weights_that_learnt_elsewhere_are_measured_under_their_own_names(tmp_path: Path) -> None:
    for name in ("eagle", "multirate-gpu", "multirate", "quantized", "unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        if name not in ("quantized", "unfinished"):
            (tmp_path / name / "training.json").write_text("{}")
    assert rivals_own.systems_in(tmp_path) == ["multirate", "eagle", "multirate-gpu"]


QUANTIZED = ("own_tokens=600", "calibration_tokens=256", "held_back=4", "longest=64", "plan.vocabulary=200")


def test_a_row_is_a_system_and_a_column_a_category(tmp_path: Path) -> None:
    assert rivals_own.tables(tmp_path) == "No run is committed yet."
    report = [
        {
            **{"category": category, "num_prompts": 3, "others_cpu_share": 0.0},
            "runs": [run("plain", 1.0), run("multirate", gain), run("lookup", gain + 0.2, 1)],
        }
        for category, gain in (("code", 0.9), ("documents", 1.1))
    ]
    facts = {"multirate": {"steps": 38, "minutes": 1.0, "tokens": 19000, "plan": "chain 3"}}
    written = {"provenance": MACHINE, "kernels": "avx512", "threads": 2, "model": "m", "tokens": 64}
    written |= {"adapters": {}, "trainings": facts, "exits": {"2": 0.1, "28": 0.6}, "report": report}
    (tmp_path / "one.json").write_text(json.dumps(written))
    text = rivals_own.tables(tmp_path)
    learnt = "trained for 1.0 minutes of a processor each on answers to prompts that the model drew"
    assert f"{learnt}; `quantized` rounded one by one (`one.json`)" in text
    written["about"] = {"multirate-gpu": "learnt on a GPU"}
    (tmp_path / "one.json").write_text(json.dumps(written))
    assert "\n\n`multirate-gpu`: learnt on a GPU.\n\n" in rivals_own.tables(tmp_path)
    written["answers"] = {"answers": 1600, "given": 900, "tokens": 20000}
    (tmp_path / "one.json").write_text(json.dumps(written))
    assert "each on 1,600 answers of 20,000 tokens, 900 of them to prompts of" in rivals_own.tables(tmp_path)
    assert "2 texts differ" in text
    assert "| `multirate` | 19,000 tokens in 38 steps | chain 3 | 0.90x | 1.10x | 1.00x | 3.00 |" in text
    assert text.index("`plain`") < text.index("`lookup`") < text.index("`multirate`"), "the fastest first"
    assert "| 0.10 | 0.60 |" in text


def test_the_ablation_takes_some_parts_alone() -> None:
    some = ablation.parts_of(argparse.Namespace(set="parts", only=["exit", "residual"]))
    assert dict(some) == {name: ablation.PARTS[name] for name in ("exit", "residual")}
    assert ablation.parts_of(argparse.Namespace(set="shapes", only=[])) == ablation.SHAPES
    with pytest.raises(SystemExit, match=r"--only: 'exits' is none of exit, exit\+feedback"):
        ablation.parts_of(argparse.Namespace(set="parts", only=["exits"]))


def test_the_ablation_adds_a_lever_in_each_row(tmp_path: Path) -> None:
    rows = ablation.levers(2048)
    assert len({row.label for row in rows}) == len(rows)
    assert {row.parts for row in rows} == set(ablation.PARTS)
    assert {row.plan.vocabulary for row in rows} == {0, 2048}
    assert {row.parts for row in ablation.shapes()} == set(ablation.SHAPES)
    assert ablation.tables(tmp_path / "none") == "No run is committed yet."
    found = {**run("accelerated residual", 1.2), "tokens_interval": [2.0, 4.0]}
    report = [
        {"prompts": name, "num_prompts": 24, "others_cpu_share": 0.0, "runs": [run("plain", 1.0), found]}
        for name in ("e2e", "sql")
    ]
    written = {
        "provenance": MACHINE,
        "kernels": "avx512",
        "model": "m",
        "steps": 50,
        "guesses": 4,
        "repeats": 2,
        "vocabulary": 2048,
    }
    written |= {"reach": [9, 13], "exit_layer": 3, "report": report}
    (tmp_path / "one.json").write_text(json.dumps(written))
    text = ablation.tables(tmp_path)
    assert "exit layer 3, reach [9, 13], 50 steps each, chains of 4 guesses, draft vocabulary of 2,048 tokens" in text
    assert "24 prompts of each set, 2 repeats" in text
    assert text.count("| 3.00 (2.00 to 4.00) | 1.20x (1.00 to 2.00) ") == 2

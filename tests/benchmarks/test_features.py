"""The experiment with features: what is trained in which order, and what is judged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import features
from benchmarks.features import BEGUN, FEATURES, RECOVERY, STORED, TITLES, ZERO
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_checkpoint
from vivace.evaluate.frames import write_frame
from vivace.prompts import Prompt, save_prompts

ANSWERS = {
    "e2e": "the cat sat on the mat",
    "wikisql": "SELECT A FROM TABLE ;",
    "snips": write_frame("Play", [("track", "a")]),
    "clinc": "translate",
}


def options(tmp_path: Path, what: str) -> list[str]:
    few, stored = make_checkpoint(tmp_path / "few", seed=1), make_checkpoint(tmp_path / "stored")
    for feature in FEATURES:
        name = f"Describe: name[x{feature.name}]"
        rows = [Prompt(f"{name} {at}", (ANSWERS[feature.name],), feature.name) for at in range(6)]
        for split in ("train", "dev"):
            save_prompts(tmp_path / "data" / f"{feature.name}-{split}.jsonl", rows)
    found = ["features", what, str(few), "--stored", str(stored), "--data", str(tmp_path / "data")]
    return [*found, "--work", str(tmp_path / "work"), "--steps", "3", "--recovery-steps", "2", "--rows", "4"]


def test_each_is_trained_once_and_after_what_it_begins_with_and_every_row_of_the_table_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        assert check
        given = dict(zip(command[::-1][1::2], command[::-1][::2], strict=False))
        init = [each.removeprefix("init=") for each in command if each.startswith("init=")]
        assert all((Path(each) / features.WEIGHTS).is_file() for each in init)
        make_lora(Path(given["--out"]), Path(given["--model"]), rank=4)
        commands.append(command)

    asked = options(tmp_path, "train")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", run)
        patched.setattr("sys.argv", [*asked, "--text", "text.jsonl"])
        features.main()
        features.main()
    outs = [
        Path(command[command.index("--out") + 1]).relative_to(tmp_path / "work" / "rank-16") for command in commands
    ]
    assert sorted(outs) == sorted(
        [Path(RECOVERY), *(Path(w) / f.name for w in (STORED, ZERO, BEGUN) for f in FEATURES)]
    )
    for command, out in zip(commands, outs, strict=True):
        model = Path(command[command.index("--model") + 1]).name
        assert model == ("stored" if out.parent.name == STORED else "few")
        assert ("loop.steps=2" in command) is (out.name == RECOVERY)
        assert any(each.startswith("init=") for each in command) is (out.parent.name == BEGUN)

    monkeypatch.setattr(
        "sys.argv",
        [*["measure" if each == "train" else each for each in asked], "--json", str(tmp_path / "out" / "a.json")],
    )
    monkeypatch.setattr(features, "DRAWS", 5)
    features.main()
    found = json.loads((tmp_path / "out" / "a.json").read_text(encoding="utf-8"))["features"]
    assert set(found["features"]) == {feature.name for feature in FEATURES}
    written = features.tables(tmp_path / "out")
    for name in (
        "stored, no LoRA",
        "few bits, recovery of rank 16 alone",
        f"{TITLES[BEGUN]}, rank 16",
        f"{TITLES[STORED]}, rank 16",
    ):
        assert f"| {name} |" in written


def test_shares_are_of_the_stored_model_with_its_own_lora() -> None:
    feature = FEATURES[3]
    rows = [Prompt(str(at), ("yes",), "clinc") for at in range(40)]
    right, half = ["yes"] * 40, ["yes", "no"] * 20
    texts = {
        "few bits, no LoRA": half,
        f"{TITLES[STORED]}, rank 8": right,
        f"{TITLES[ZERO]}, rank 8": half,
        f"{TITLES[BEGUN]}, rank 8": right,
    }
    found = features.judged(feature, rows, texts, [8], [ZERO, BEGUN])
    assert found["few bits, no LoRA"] == {"value": 0.5}
    assert found[f"{TITLES[BEGUN]}, rank 8"] == {"value": 1.0, "kept": {"estimate": 1.0, "low": 1.0, "high": 1.0}}
    kept = found[f"{TITLES[ZERO]}, rank 8"]["kept"]
    assert kept["low"] < kept["estimate"] == 0.5 < kept["high"]


def test_one_feature_in_one_way_is_trained_and_judged_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Path] = []

    def run(command: list[str], check: bool) -> None:
        given = dict(zip(command[::-1][1::2], command[::-1][::2], strict=False))
        make_lora(Path(given["--out"]), Path(given["--model"]), rank=4)
        trained.append(Path(given["--out"]).relative_to(tmp_path / "work"))

    asked = [*options(tmp_path, "train"), "--features", "clinc", "--ways", ZERO, "--ranks", "4"]
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", run)
        patched.setattr("sys.argv", asked)
        features.main()
    assert sorted(trained) == [Path("rank-4", way, "clinc") for way in (ZERO, STORED)]
    monkeypatch.setattr("sys.argv", ["features", "measure", *asked[2:], "--json", str(tmp_path / "a.json")])
    monkeypatch.setattr(features, "DRAWS", 5)
    features.main()
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["features"]["features"]
    assert list(found) == ["clinc"]
    assert list(found["clinc"]["systems"]) == [
        "stored, no LoRA",
        "few bits, no LoRA",
        f"{TITLES[STORED]}, rank 4",
        f"{TITLES[ZERO]}, rank 4",
    ]

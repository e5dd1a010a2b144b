"""Everything that lies in the runs folder plays, own models beside their own plain text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import rivals
from benchmarks.rivals_table import NONE_YET, read_reports, tables
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.decode.shallow import DraftPlan
from vivace.methods.lookahead.drafter import LookaheadPlan
from vivace.prompts import Prompt
from vivace.train.resume import write_state


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.Namespace]:
    """A small model and rows to learn; drafts are compared on answers of a few tokens."""
    search = rivals.search
    monkeypatch.setattr(rivals, "search", lambda *args, **fields: search(*args, **{**fields, "max_new_tokens": 8}))
    make_checkpoint(tmp_path / "base", layers=4)
    rows = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdef" for b in "klmnop"]
    lines = [json.dumps({"prompt": row.request, "reference": row.references[0]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return argparse.Namespace(
        model=str(tmp_path / "base"),
        runs=tmp_path / "runs",
        data=[tmp_path / "rows.jsonl"],
        kinds=["deed"],
        rates=None,
        minutes=0.01,
        prompts=str(tmp_path / "rows.jsonl"),
        limit=2,
        tune_limit=1,
        max_new_tokens=6,
        repeats=1,
    )


def test_what_was_trained_and_tuned_is_measured(given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    training = rivals._training

    def small(*told: object) -> list[str]:
        return [*training(*told), "held_back=8", "adapter={exit_layer: 2, bottleneck: 8}", "tokens_per_batch=128"]

    monkeypatch.setattr(rivals, "_training", small)
    monkeypatch.setattr(rivals, "candidates_of", lambda engine, method: [DraftPlan.chain(1), DraftPlan((2, 1))])
    rivals.train(given)
    tried = json.loads((given.runs / "tuning.json").read_text())
    assert {row["out"] for row in tried} == {"deed-0.001", "deed-0.003"}
    assert not (given.runs / "deed" / "run").exists()
    make_checkpoint(given.runs / "layerskip", seed=1, layers=4)
    report = rivals.measure(given)
    rows = {row["method"]: row for row in report["runs"]}
    assert set(rows) >= {
        *("plain", "lookup", "lookahead", "layerskip", "deed"),
        *("plain on the layerskip model", "layerskip on the layerskip model"),
    }
    assert all(row["identical"] for row in rows.values())
    assert rows["deed"]["extra_bytes"] > 0 == rows["lookahead"]["extra_bytes"]
    assert rows["deed"]["training"]["steps"] > 0
    assert rows["deed"]["plan"] in ("chain 1", "tree 2-1")
    assert rows["layerskip"]["training"] is None
    assert {"verify", "draft"} == set(rows["deed"]["layers_per_step"])
    lines = rivals.tables([report]).splitlines()
    assert len(lines) == 4 + len(rows)
    assert all("same text" in line for line in lines[4:])


def test_drafts_are_found_for_what_lies_there_and_for_what_needs_no_weights(
    given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(given.runs / "layerskip", seed=1, layers=4)
    given.kinds = None
    plans = {"lookahead": [LookaheadPlan(3, 2, 2)], "layerskip": [DraftPlan.chain(2)]}
    monkeypatch.setattr(rivals, "candidates_of", lambda engine, method: plans[method])
    rivals.tune(given)
    assert set(json.loads((given.runs / "plans.json").read_text())) == {"lookahead", "layerskip"}
    assert load_adapter(given.runs / "layerskip" / "adapters" / "layerskip")[0]["plan"]["widths"] == [1, 1]
    assert not (Path(given.model) / "adapters").exists()
    rows = {row["method"]: row for row in rivals.measure(given)["runs"]}
    assert rows["lookahead"]["plan"] == "N 3 W 2 G 2"
    assert rows["layerskip"]["plan"] == rows["layerskip on the layerskip model"]["plan"] == "chain 2"
    trials = json.loads((given.runs / "tuning.json").read_text())
    given.kinds, plans["lookahead"] = ["lookahead"], [LookaheadPlan(2, 2, 2)]
    rivals.tune(given)
    kept = json.loads((given.runs / "plans.json").read_text())
    assert set(kept) == {"lookahead", "layerskip"}, "a draft that was not searched again stays"
    assert kept["lookahead"]["ngram"] == 2
    again = json.loads((given.runs / "tuning.json").read_text())
    assert sorted(row["out"] for row in again) == sorted(row["out"] for row in trials)


def test_facts_of_a_training_are_its_snapshots(tmp_path: Path) -> None:
    assert rivals.training_facts(tmp_path) is None
    for stage, (steps, seconds) in enumerate([(30, 60.0), (12, 90.0)]):
        (tmp_path / "run" / f"stage-{stage}").mkdir(parents=True)
        write_state(
            tmp_path / "run" / f"stage-{stage}" / "state.pt", {"progress": {"step": steps, "elapsed_s": seconds}}
        )
    assert rivals.training_facts(tmp_path) == {"steps": 42, "minutes": 2.5}
    rivals.require_steps([tmp_path, tmp_path / "of no snapshots"], 42)
    with pytest.raises(SystemExit, match="was trained for 42 steps, and --steps says 300"):
        rivals.require_steps([tmp_path], 300)


def played(method: str, speedup: float, rate: float, **more: object) -> dict[str, object]:
    return {
        **{"method": method, "speedup": speedup, "speedup_interval": (speedup, speedup), "identical": True},
        **{"num_different": 0, "tokens_per_target_pass": None, "mean_exit_layer": None, "quality": None},
        **{"extra_bytes": 0, "training": None, "plan": None, "end_to_end_tokens_per_s": rate},
        **more,
    }


def reported(prompts: str, *runs: dict[str, object], model: str = "m", cpu: str = "c") -> dict[str, object]:
    limits = {"num_prompts": 5, "max_new_tokens": 6, "repeats": 3}
    setting = {"model": model, "kernels": "k", "prompts": prompts, **limits}
    provenance = {"cpu": cpu, "num_threads": 2, "commit": None}
    return {"setting": setting, "provenance": provenance, "runs": [played("plain", 1.0, 10.0), *runs]}


def test_one_table_for_several_prompt_sets() -> None:
    def report(prompts: str, speedup: float, quality: dict[str, float]) -> dict[str, object]:
        more = {"extra_bytes": 2_500_000, "training": {"steps": 9, "minutes": 1.0}, "mean_exit_layer": 18.25}
        text = {"identical": False, "num_different": 3, "quality": {prompts: quality}}
        return reported(prompts, played("mod", speedup, 15.0, **more, **text))

    text = tables([report("sql", 2.0, {"exact_match": 0.5}), report("e2e", 0.5, {"bleu": 40.123})])
    assert "sql: 5 prompts, e2e: 5 prompts" in text
    assert "whole answers" in text
    assert text.splitlines()[-1] == (
        "| mod | 2.5 | 9 steps, 1 min | - | "
        "2.00x (2.00 to 2.00), 1.50x whole, 18.2 layers, 3 texts differ, exact match 0.5 | "
        "0.50x (0.50 to 0.50), 1.50x whole, 18.2 layers, 3 texts differ, BLEU 40.1 | 1.00x, 1.50x |"
    )
    assert tables([]) == NONE_YET


def test_another_processor_is_another_table() -> None:
    text = tables([reported("e2e"), reported("sql"), reported("sql", cpu="other")])
    assert text.count("| method |") == 2
    assert "| method | extra MB | training | draft | e2e | sql |" in text
    assert "| method | extra MB | training | draft | sql |" in text


def test_reports_that_do_not_fit_one_table_are_refused() -> None:
    longer = reported("sql")
    longer["setting"] = {**dict[str, object](longer["setting"]), "max_new_tokens": 300}  # type: ignore[call-overload]
    for other in (reported("e2e"), longer):
        with pytest.raises(ValueError, match="one table of m over prompts twice or other limits: e2e, "):
            tables([reported("e2e"), other])


def test_captions_say_what_rows_rest_on() -> None:
    streams = played("multistream", 2.0, 20.0, plan="chain 3 from kept node", extra_bytes=3656696)
    streams["tokens_per_target_pass"] = 3.0
    rows = (streams, played("medusa", 1.5, 12.0), played("dynamic", 0.5, 5.0), played("draft", 1.2, 12.0))
    text = tables([reported("e2e", *rows, model="vivace-14m-x4")])
    assert "`medusa`, `draft` go through Python in every step" in text
    assert "`multistream` runs `attach: kept`: a step has 24 layer passes to verify and 12 more" in text
    assert "3.00 a pass, 2.00 for 24 layers" in text
    assert "The router of `dynamic` is one hidden layer (MLP), not the paper's ARLA." in text
    assert "The draft model was widened with its target" in text
    assert "256 + 351 + 255 + 621" in text
    told = {"layers_per_step": {"verify": 4, "draft": 1}, "extra_bytes": 5}
    assert "4 layer passes to verify and 1 more" in tables([reported("e2e", streams | told)])
    with pytest.raises(ValueError, match="not known where streams of 5 bytes"):
        tables([reported("e2e", streams | {"extra_bytes": 5})])


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is not a report"):
        read_reports(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        read_reports(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("own",), "own needs --model, --answers"),
        (("chat", "--model", "m", "--tuning", "t"), "chat needs --json"),
        (("chat", "--model", "m", "--tuning", "t", "--json", "j"), "has no exits.json"),
    ],
)
def test_what_is_lacking_is_said_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["rivals", *words, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit):
        rivals.main()
    assert said in capsys.readouterr().err

"""A method that is one folder and one line of the table is in every list, and works wherever methods are named."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

import vivace
from tests.methods.bigram.spec import BIGRAM
from tests.tiny_checkpoints import make_checkpoint
from tools.write_docs import methods_table
from vivace.checkpoint.widen import widen_checkpoint, without_twin
from vivace.cli.app import run
from vivace.decode.shallow import DraftPlan
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.methods.composition import adapters_by_method, plan_of, twins
from vivace.methods.table import METHODS
from vivace.prompts import Prompt, save_prompts
from vivace.recipes.kinds import kinds
from vivace.serve.catalog import Catalog
from vivace.tuning import candidates_of, keep_plan, search, tuned_methods

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, BIGRAM.name, BIGRAM)  # type: ignore[arg-type]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A model beside which ``vivace train`` has put the toy's weights, by the recipe that its spec implies."""
    model = make_checkpoint(tmp_path / "model")
    save_prompts(tmp_path / "words.jsonl", WORDS)
    into = ["--data", str(tmp_path / "words.jsonl"), "--out", str(model / "adapters" / "bigram")]
    short = ["loop.minutes=null", "loop.steps=3", "loop.warmup_steps=1", "tokens_per_batch=128", "held_back=8"]
    assert run(["train", "bigram", "--model", str(model), *into, *short]) == 0
    return model


def test_it_is_trained_and_decodes_the_text_of_plain(trained: Path) -> None:
    engine = vivace.load(trained)
    assert "bigram" in engine.methods.ready()
    prompts, options = ["aka", "the quick"], {"max_new_tokens": 12, "do_sample": False}
    drafted = engine.generate(prompts, method="bigram", num_draft_tokens=3, **options)
    plain = engine.generate(prompts, method="plain", **options)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.stats.num_draft_tokens for result in drafted)


def test_it_is_served_tuned_and_widened(trained: Path, tmp_path: Path) -> None:
    engine = vivace.load(trained)
    catalog = Catalog(engine, "base", "auto", {"quick": trained / "adapters" / "bigram"})
    assert "bigram" in catalog.methods("base")
    assert catalog.method("quick", "bigram") == "bigram"
    assert adapters_by_method([trained / "adapters" / "bigram"], None).keys() == {"bigram"}

    assert "bigram" in tuned_methods()
    plans = candidates_of(engine, "bigram", 2)
    asked = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in ("aka", "bob")]
    best = search(engine, "bigram", plans, asked, max_new_tokens=4)[0].plan
    keep_plan(engine, "bigram", best)
    assert plan_of("bigram", asdict(best)) == best  # type: ignore[call-overload]
    assert {plan.label for plan in plans} == {DraftPlan.chain(1).label, DraftPlan.chain(2).label}

    assert without_twin(trained, twins()) == ()
    widen_checkpoint(trained, tmp_path / "wide", 2, twins())
    assert "bigram" in vivace.load(tmp_path / "wide").methods.ready()


def test_it_is_in_every_list(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "bigram" in kinds()
    assert "| `bigram` | the likeliest follower of each token drafts | `bigram` | same text |" in methods_table()
    assert run(["doctor", str(trained)]) == 0
    assert "method bigram" in capsys.readouterr().out
    assert run(["generate", "--model", str(trained), "--method", "bigram", "--max-new-tokens", "4", "aka"]) == 0
    assert run(["generate", "--model", str(trained), "--method", "bigrm", "aka"]) != 0
    assert "bigram" in capsys.readouterr().err, "the nearest name is found in the same table"

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import vivace
from tests.adapters.loras import make_lora
from tests.cli.conftest import FakeEngine, Outcome
from tests.tiny_checkpoints import make_checkpoint

Cli = Callable[..., Outcome]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}), encoding="utf-8")
    return tmp_path / "sql"


@pytest.mark.parametrize("given", ["{}", "sql={}"])
def test_a_lora_is_loaded_and_worn(cli: Cli, engine: FakeEngine, lora: Path, given: str) -> None:
    """Under its own name, or that of its folder; whatever the method."""
    outcome = cli("generate", "hello", "--adapter", given.format(lora), "--use", "sql", "--method", "plain")
    assert outcome.status == 0
    assert engine.opened["adapters"] == (str(lora) if given == "{}" else {"sql": str(lora)})
    assert engine.asked[-1][1]["adapter"] == "sql"


def test_several_beside_draft_weights(cli: Cli, engine: FakeEngine, lora: Path) -> None:
    flags = ["--adapter", f"a={lora}", "--adapter", "drafts=some-folder", "--use", "a"]
    assert cli("generate", "hello", *flags).status == 0
    assert engine.opened["adapters"] == {"a": str(lora), "drafts": "some-folder"}
    outcome = cli("generate", "hello", *flags, "--method", "plain")
    assert (outcome.status, outcome.err.splitlines()[-1]) == (
        2,
        "error: --adapter has no effect on plain; leave it out, or choose a method that has one",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--adapter", "sql={}", "--use", "sqm"], "--use 'sqm': no LoRA of this name is given; did you mean 'sql'?"),
        (["--use", "sql"], "--use 'sql': no LoRA of this name is given; give --adapter sql=DIR with a LoRA in DIR"),
        (["--adapter", "{}"], "--adapter sql is a LoRA, and this command does not use it; give --use sql"),
        (["--adapter", "a={0}", "--adapter", "b={0}", "--use", "b"], "--adapter a is a LoRA beside --use b"),
    ],
)
def test_what_would_have_no_effect(cli: Cli, engine: FakeEngine, lora: Path, words: list[str], says: str) -> None:
    outcome = cli("generate", "hello", *(word.format(lora) for word in words))
    assert outcome.status == 2
    assert says in outcome.err
    assert engine.opened == {}


def test_other_commands_take_none(cli: Cli, engine: FakeEngine, lora: Path) -> None:
    outcome = cli("check", "--adapter", str(lora))
    assert outcome.status == 2
    assert "this command does not use it" in outcome.err


def test_evaluate_compares_formats_that_wear_the_same(cli: Cli, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", context=512)
    make_lora(tmp_path / "sql", base)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Write SQL for: x", "reference": "a b c", "task": "wikisql"}\n', encoding="utf-8")
    words = ("evaluate", base, "--prompts", prompts, "--max-new-tokens", 6, "--weights", "bf16,int8", "--json")
    worn = cli(*words, "--adapter", f"sql={tmp_path / 'sql'}", "--use", "sql").json
    bare = cli(*words).json
    assert (worn["setting"]["adapter"], bare["setting"]["adapter"]) == ("sql", None)
    for one, other in zip(worn["weights"], bare["weights"], strict=True):
        assert one["reference_nll"] != other["reference_nll"]
        assert one["num_bytes"] > other["num_bytes"]
    engine = vivace.load(base, adapters={"sql": tmp_path / "sql"})
    asked = engine.tokenizer.encode_prompt("Write SQL for: x")
    answer = [*engine.tokenizer.encode("a b c", special=False), engine.tokenizer.eos_ids[0]]
    logits = engine.logits([[*asked, *answer]], adapter="sql")[0].log_softmax(-1)
    wanted = -sum(float(logits[len(asked) - 1 + at, token]) for at, token in enumerate(answer)) / len(answer)
    assert worn["weights"][0]["reference_nll"] == pytest.approx(wanted, rel=1e-3)
    outcome = cli(*words, "--adapter", f"sql={tmp_path / 'sql'}")
    assert (outcome.status, "--use names" in outcome.err) == (2, True)

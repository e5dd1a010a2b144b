from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import FakeEngine, Outcome
from vivace.answer import Result
from vivace.cli.generate import summary
from vivace.decode.stats import DecodeStats

Cli = Callable[..., Outcome]


def test_text_goes_to_stdout_and_notes_to_stderr(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("generate", "hello")
    assert (outcome.status, outcome.out) == (0, "HELLO\n")
    assert "3 tokens, 4.0 tokens/s, method plain, 2/4 drafted tokens accepted" in outcome.err
    assert "ended by stop; auto: lookup pays" in outcome.err
    assert cli("generate", "hello", "--quiet") == Outcome(0, "HELLO\n", "")


def test_an_answer_of_one_block_has_no_speed() -> None:
    stats = DecodeStats(method="quantized", num_tokens=4, num_first_tokens=4)
    assert summary(Result("", (), None, "length", stats, "quantized")).startswith("4 tokens, method quantized")


def test_only_flags_that_were_given_reach_the_engine(cli: Cli, engine: FakeEngine) -> None:
    cli("generate", "hello")
    prompt, settings = engine.asked[-1]
    assert callable(settings.pop("progress"))
    assert (prompt, settings) == ("hello", {"method": "auto", "raw": False})
    flags = "--do-sample --temperature 0 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --seed 0 --raw"
    flags += " --exact --no-repeat-ngram-size 3 --stop-strings a --stop-strings b --method lookup --max-new-tokens 9"
    cli("generate", "hello", *flags.split())
    settings = engine.asked[-1][1]
    del settings["progress"]
    assert settings == {
        "do_sample": True,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "stop_strings": ["a", "b"],
        "seed": 0,
        "raw": True,
        "exact": True,
        "method": "lookup",
        "max_new_tokens": 9,
    }


def test_the_model_is_opened_as_asked(cli: Cli, engine: FakeEngine) -> None:
    cli("generate", "hello")
    plain = {"device": "auto", "dtype": "auto", "adapters": None, "draft_model": None, "kernels": "auto"}
    plain |= {"weights": "bf16", "kv": "same", "screened_head": None, "memory": None, "reader": "auto"}
    plain |= {"ignore_config_keys": (), "prompt_cache": None, "prompt_cache_ro": False, "prompt_cache_bytes": None}
    plain |= dict.fromkeys(("parallel", "wire", "link_interface", "timeout", "guard", "prompt_pool"))
    plain |= {"recovery": True, "remember": True, "attention": "auto"}
    assert engine.opened == {"path": None, **plain}
    cli("generate", "hello", "--model", "m", "--adapter", "a/one", "--draft-model", "d", "--dtype", "float32")
    assert engine.opened == {**plain, "path": "m", "adapters": "a/one", "draft_model": Path("d"), "dtype": "float32"}
    cli("generate", "hello", "--weights", "q4")
    assert engine.opened == {**plain, "path": None, "weights": "q4"}
    cli("generate", "hello", "--adapter", "a/one", "--adapter", "x=a/two")
    assert engine.opened["adapters"] == {"one": "a/one", "x": "a/two"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--adapter", "a=x", "--adapter", "a=y"], "the name 'a' is taken by x"),
        (["--adapter", "=x"], "expected [NAME=]DIR"),
    ],
)
def test_adapter_names_are_checked(cli: Cli, engine: FakeEngine, words: list[str], complaint: str) -> None:
    outcome = cli("generate", "Hi", *words, "--quiet")
    assert outcome.status == 2
    assert complaint in outcome.err


def test_prompts_come_from_stdin_a_text_file_or_jsonl(cli: Cli, engine: FakeEngine, tmp_path: Path) -> None:
    assert cli("generate", "-", stdin="from a\npipe\n").out == "PIPE\n"
    assert engine.asked[-1][0] == "from a\npipe"
    (tmp_path / "p.txt").write_text("from a file\n", encoding="utf-8")
    assert cli("generate", "--prompt-file", tmp_path / "p.txt").out == "FROM A FILE\n"
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    outcome = cli("generate", "--prompt-file", tmp_path / "p.jsonl")
    assert outcome.out == "ONE\nTWO\n"
    assert "[2/2]" in outcome.err


def test_json_is_one_object(cli: Cli, engine: FakeEngine) -> None:
    (result,) = cli("generate", "hello", "--json").json["results"]
    assert result["text"] == "HELLO"
    assert result["token_ids"] == [5, 6, 7]
    assert result["logprobs"] is None
    assert result["finish_reason"] == "stop"
    assert result["stats"]["num_tokens"] == 3
    assert result["stats"]["tokens_per_target_pass"] == 1.5


def test_broken_prompt_files_are_named(cli: Cli, engine: FakeEngine, tmp_path: Path) -> None:
    assert "no such file" in cli("generate", "--prompt-file", tmp_path / "none.txt").err
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    outcome = cli("generate", "--prompt-file", tmp_path / "bytes.txt")
    assert (outcome.status, "not UTF-8 text" in outcome.err) == (1, True)
    assert "found both" in cli("generate", "Hi", "--prompt-file", tmp_path / "p.txt").err
    assert engine.opened == {}


@pytest.mark.parametrize("wrong", ["²", "-1", "x", ""])
def test_token_ids_that_are_no_numbers_are_named(cli: Cli, engine: FakeEngine, wrong: str) -> None:
    outcome = cli("generate", "--token-ids", f"{wrong},3")
    assert outcome.status == 2
    assert f"--token-ids has {wrong!r}; write numbers with commas between them" in outcome.err
    assert outcome.err.count("\n") == 1

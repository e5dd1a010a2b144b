"""The commands on a real, tiny checkpoint: nothing faked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.loras import make_lora
from tests.cli.conftest import Outcome
from tests.every_method import make_model
from tests.tiny_checkpoints import make_checkpoint
from vivace.evaluate import benchmark, sameness
from vivace.evaluate.sameness import Difference, Sameness

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_streamed_text_is_the_text_of_the_result(cli: Cli, folder: Path) -> None:
    words = ("generate", "Hello", "--model", folder, "--max-new-tokens", 12, "--method", "lookup")
    outcome = cli(*words)
    assert outcome.status == 0, outcome.err
    (result,) = cli(*words, "--json", "--logprobs").json["results"]
    assert outcome.out == result["text"] + "\n"
    assert len(result["token_ids"]) == len(result["logprobs"]) == result["stats"]["num_tokens"]
    assert result["stats"]["method"] == "lookup"


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["--method", "lokup"], 2, "did you mean 'lookup'"),
        (["--method", "mod"], 1, "vivace train mod"),
        (["--method", "multirate"], 1, "vivace train"),
        (["--method", "draft"], 1, "--draft-model"),
        (["--temperature", "-1"], 2, "temperature must be >= 0, found -1.0"),
        (["--max-new-tokens", "999"], 2, "the context holds 256"),
        (["--kernels", "cuda"], 2, "kernels must be auto, torch"),
        (["--adapter", "nowhere", "--method", "multirate"], 1, "nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli: Cli, folder: Path, words: list[str], status: int, complaint: str) -> None:
    outcome = cli("generate", "Hello", "--model", folder, *words, "--quiet")
    assert complaint in outcome.err
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (status, "", 1)


def test_beams_are_printed_with_their_scores(cli: Cli, folder: Path) -> None:
    words = ["generate", "hello", "--model", folder, "--num-beams", "3", "--max-new-tokens", "8"]
    one = cli(*words, "--early-stopping", "never", "--length-penalty", "2")
    assert one.status == 0, one.err
    assert "beam score -" in one.err
    several = cli(*words, "--num-return-sequences", "2", "--min-new-tokens", "8")
    scores = [float(line.split()[0]) for line in several.out.splitlines() if line.startswith("-")]
    assert len(scores) == 2
    assert scores[0] >= scores[1]
    (result,) = cli(*words, "--num-return-sequences", "2", "--min-new-tokens", "8", "--json").json["results"]
    assert result["score"] == pytest.approx(scores[0], abs=1e-4)
    assert result["alternatives"][0]["score"] == pytest.approx(scores[1], abs=1e-4)
    assert cli(*words, "--early-stopping", "soon").status == 2


def test_a_truncated_model_is_one_line(cli: Cli, tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    outcome = cli("generate", "Hello", "--model", broken, "--quiet")
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert "model.safetensors" in outcome.err
    assert cli("generate", "Hello", "--model", tmp_path / "none", "--quiet").status == 1


def test_check_compares_every_lossless_method(cli: Cli, folder: Path) -> None:
    outcome = cli("check", folder, "--limit", 3, "--max-new-tokens", 12)
    ready = ("lookup", "lookahead", "layerskip")
    assert outcome.status == 0
    plain, *others = outcome.out.splitlines()
    assert plain.startswith("plain: identical: yes (3 of 3 answers beside the checkpoint in float32, layer by layer")
    assert others == [f"{name}: identical: yes (3 of 3 answers)" for name in ready]
    found, *others = cli("check", "--model", folder, "--limit", 2, "--max-new-tokens", 8, "--batch", 2, "--json").json[
        "methods"
    ]
    assert (found["method"], found["identical"], found["num_prompts"]) == ("lookup", True, 2)
    assert len(others) == 2


def test_a_difference_is_shown_and_is_a_failure(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    differences = tuple(Difference(prompt=i, position=4, plain=1, found=2, gap=0.25) for i in range(7))
    found = [Sameness("lookup", 9, 99, (*differences, Difference(8, 2, None, 3, None)))]
    monkeypatch.setattr(sameness, "compare", lambda *_, **__: ([()], found))
    outcome = cli("check", folder, "--limit", 1)
    assert outcome.status == 1
    assert outcome.out.splitlines()[1:] == [
        "lookup: identical: no (1 of 9 answers)",
        *[f"  prompt {i}, token 5: logits 0.25 apart" for i in range(1, 6)],
        "  and 3 more",
    ]
    summarise = benchmark.summarise
    changed = lambda *args: [replace(run, identical=False) for run in summarise(*args)]  # noqa: E731
    monkeypatch.setattr(benchmark, "summarise", changed)
    outcome = cli("demo", "--model", folder, "--tasks", "e2e,sql", "--prompts", 1, "--repeats", 1)
    assert (outcome.status, outcome.out.count("lookup: identical: no")) == (1, 2)


def test_bench_writes_figures_with_their_provenance(cli: Cli, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "results.json"
    words = ("bench", "decode", "--model", folder, "--limit", 2, "--max-new-tokens", 6, "--repeats", 1)
    outcome = cli(*words, "--methods", "plain,lookup", "--peers", "transformers", "--json", target)
    assert outcome.status == 0, outcome.err
    assert "speed-up" in outcome.out
    report = json.loads(target.read_text())
    assert {"provenance", "roofline", "setting", "quality", "runs"} <= set(report)
    assert [run["method"] for run in report["runs"]] == ["plain", "lookup", "transformers"]
    assert report["runs"][1]["identical"] is True
    assert report["runs"][0]["speedup"] == 1.0
    assert report["runs"][0]["tokens_per_target_pass"] == 1.0
    assert report["setting"]["num_prompts"] == 2
    assert report["quality"]["e2e"]["num_texts"] == 2
    assert set(report["memory"]["held"]) == {"plain", "lookup", "transformers"}
    assert all(found["weights"] > 0 < found["cache"] for found in report["memory"]["held"].values())
    assert report["memory"]["libraries"] > 0
    assert report["provenance"]["best_kernels"] in ("torch", "avx2", "avx512", "amx")
    assert cli(*words, "--methods", "plain", "--json", "-").json["runs"][0]["method"] == "plain"
    assert "add it" in cli(*words, "--methods", "lookup").err


def test_bench_drafts_by_the_plans_it_is_given(cli: Cli, folder: Path, tmp_path: Path) -> None:
    words = ("bench", "decode", "--model", folder, "--draft-model", folder, "--limit", 1, "--max-new-tokens", 6)
    words = (*words, "--repeats", 1, "--methods", "plain,draft", "--json", "-")
    assert [run.get("plan") for run in cli(*words).json["runs"]] == [None, "chain 4"]
    plans = tmp_path / "plans.json"
    plans.write_text('{"draft": {"widths": [1, 1]}}')
    run = cli(*words, "--plans", plans).json["runs"][1]
    assert (run["plan"], len(run["acceptance_per_position"])) == ("chain 2", 2)
    assert run["layers_per_step"] == {"verify": 2, "draft": 0}
    for text, complaint in (
        ('{"medusa": {"widths": [1]}}', "is for methods of --methods; found medusa"),
        ('{"plain": {"widths": [1]}}', "method plain drafts by no plan"),
        ('{"draft": {"width": [1]}}', "widths"),
        ("[]", "no object"),
        ("{", "plans.json"),
    ):
        plans.write_text(text)
        outcome = cli(*words, "--plans", plans)
        assert outcome.status == 2, text
        assert complaint in outcome.err, text


def test_demo_shows_samples_and_identity(cli: Cli, folder: Path) -> None:
    outcome = cli("demo", "--model", folder, "--tasks", "e2e,sql", "--prompts", 1, "--repeats", 1)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("> Describe: ") == 1
    assert outcome.out.count("lookup: identical: yes") == 2
    assert f"nothing was trained on this model; `vivace train multirate --model {folder}` makes drafts" in outcome.err


def test_demo_of_another_model_is_a_chat(cli: Cli, folder: Path) -> None:
    report = cli("demo", "--model", folder, "--prompts", 1, "--repeats", 1, "--json").json
    assert list(report["runs"]) == list(report["samples"]) == ["chat"]
    assert [run["method"] for run in report["runs"]["chat"]] == ["plain", "lookup"]
    outcome = cli("demo", "--model", folder, "--tasks", "chatt")
    assert outcome.status == 2
    assert "no packaged prompt set 'chatt'; did you mean 'chat'?" in outcome.err


def test_demo_leaves_out_what_only_loads_ahead_where_all_is_in_memory(cli: Cli, tmp_path: Path) -> None:
    words = ("--prompts", 1, "--repeats", 1, "--json")
    outcome = cli("demo", "--model", "vivace-5m-moe", *words)
    assert [run["method"] for run in outcome.json["runs"]["chat"]] == ["plain", "lookup"]
    assert "foresight is left out, since all weights are in memory: vivace convert STORE --store" in outcome.err
    assert "nothing was trained" not in outcome.err
    assert cli("convert", tmp_path / "store", "--store", "--model", "vivace-5m-moe").status == 0
    report = cli("demo", "--model", tmp_path / "store", *words).json
    assert [run["method"] for run in report["runs"]["chat"]] == ["plain", "lookup", "foresight"]


def test_demo_shows_what_was_trained(cli: Cli, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "medusa")
    runs = cli("demo", "--model", folder, "--prompts", 1, "--repeats", 1, "--json").json["runs"]["chat"]
    assert [run["method"] for run in runs] == ["plain", "lookup", "medusa"]


def test_doctor_says_what_works(cli: Cli, folder: Path, tmp_path: Path) -> None:
    report = cli("doctor", folder, "--json").json
    works = {finding["subject"]: finding["works"] for finding in report["findings"]}
    assert report["can_answer"] is True
    assert works["method lookup"]
    assert not works["method multirate"]
    outcome = cli("doctor", tmp_path / "none")
    assert outcome.status == 1
    assert "--  model" in outcome.out


def test_inspect_counts_what_is_stored(cli: Cli, folder: Path) -> None:
    facts = cli("inspect", folder, "--json", "--tensors").json
    assert facts["model_type"] == "llama"
    assert facts["parameters"] == sum(_size(tensor["shape"]) for tensor in facts["tensors"])
    assert facts["layers"] == 2
    assert "model.embed_tokens.weight" in cli("inspect", folder, "--tensors").out


def test_the_wide_twin_says_the_same(cli: Cli, folder: Path, tmp_path: Path) -> None:
    done = cli("widen", tmp_path / "wide", "--model", folder, "--factor", 2, "--json").json
    assert done["parameters"] > 2 * cli("inspect", folder, "--json").json["parameters"]
    words = ("generate", "Hello", "--max-new-tokens", 12, "--method", "plain")
    assert cli(*words, "--model", tmp_path / "wide").out == cli(*words, "--model", folder).out
    assert cli("widen", tmp_path / "no", "--model", folder, "--factor", 1).status == 2


def _size(shape: list[int]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def test_convert_writes_a_file_for_another_engine(cli: Cli, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model.gguf"
    done = cli("convert", target, "--model", folder, "--type", "q8_0", "--json").json
    assert (done["type"], done["bytes"]) == ("q8_0", target.stat().st_size)
    assert "bf16, " in cli("convert", tmp_path / "m.gguf", "--type", "bf16").out
    assert "a GGUF file cannot say all that this tokenizer does" in cli("convert", tmp_path / "m.gguf").err, (
        "the model that ships splits in its own way"
    )
    assert cli("convert", tmp_path / "m.bin", "--model", folder).status == 2
    assert "did you mean 'q8_0'" in cli("convert", tmp_path / "m.gguf", "--model", folder, "--type", "q8").err


def test_bench_prefill_measures_what_the_schedule_predicts(cli: Cli, folder: Path) -> None:
    words = ("bench", "prefill", "--model", folder, "--lengths", "60,100", "--prefills", "full,lazy,random")
    outcome = cli(*words, "--repeats", 2, "--new-tokens", 5, "--json", "-")
    assert outcome.status == 0, outcome.err
    rows = outcome.json["rows"]
    assert outcome.json["setting"]["new_tokens"] == 5
    assert [(row["num_tokens"], row["prefill"]) for row in rows] == [
        (length, name) for length in (60, 100) for name in ("full", "lazy", "random")
    ]
    for row in rows:
        assert row["measured_share"] == pytest.approx(row["predicted_share"])
        assert len(row["seconds"]) == 2
        assert (row["measured_share"] < 1) == (row["prefill"] != "full")
        assert row["answer_s"] > row["first_token_s"]
        assert row["decode_tokens_per_s"] > 4 / row["answer_s"], "the first token's time is left out"
        if row["prefill"] == "full":
            assert row["speedup"] == row["answer_speedup"] == 1
            assert row["predicted_s"] == row["first_token_s"]
        else:
            assert row["predicted_s"] > 0
    table = cli(*words, "--keep", "0:0.3", "--prefills", "full,lexical", "--repeats", 1, "--lengths", 60)
    assert table.status == 0, table.err
    assert "lexical" in table.out


def test_generate_says_how_the_prompt_was_read(cli: Cli, folder: Path) -> None:
    words = ("generate", "abc abc abc abc", "--model", folder, "--method", "plain", "--max-new-tokens", 2)
    assert "prefill" not in cli(*words).err
    assert "prefill lazy begins at 512" in cli(*words, "--prefill", "lazy").err
    said = cli(*words, "--prefill", "lazy", "--keep", "1:0.5", "--min-prompt", 2).err
    assert "prefill lazy (lossy): of" in said
    assert "from layer 1 on" in said


def test_widening_says_where_loras_lie(cli: Cli, folder: Path, tmp_path: Path) -> None:
    make_lora(tmp_path / "sql", folder)
    words = ("widen", tmp_path / "wide", "--model", folder, "--factor", 2, "--adapter", tmp_path / "sql", "--json")
    assert cli(*words).json["loras"] == [str(tmp_path / "wide" / "loras" / "sql")]
    assert (tmp_path / "wide" / "loras" / "sql" / "adapter_config.json").is_file()

"""What a user can get wrong, command by command, on real files: one line, a status, and nothing lost or left.

Nothing is faked but the full disk.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.errors import UsageError, VivaceError

Cli = Callable[..., Outcome]

USAGE = UsageError.exit_code
FAILED = VivaceError.exit_code
LONG = "oak " * 400
RECIPE = {
    "kind": "multirate",
    "adapter": {"gate": 1, "rank": 4, "bottleneck": 8},
    "loop": {"steps": 2, "warmup_steps": 1},
    "tokens_per_batch": 256,
    "held_back": 4,
}
SCRATCH = {
    "kind": "decoder",
    "shape": {
        "num_layers": 2,
        "width": 32,
        "ffn_width": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "vocab_size": 300,
        "max_positions": 64,
    },
    "stages": [{"loop": {"steps": 2, "warmup_steps": 1}}],
    "longest": 48,
    "tokens_per_batch": 256,
    "held_back": 4,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything the table names; tests work on copies."""
    place = tmp_path_factory.mktemp("original")
    tiny = make_checkpoint(place / "tiny")
    other = make_checkpoint(place / "other", seed=1)
    _respell(make_checkpoint(place / "respelt") / "tokenizer.json")
    make_adapter(place / "adapter", tiny)
    make_adapter(place / "of-other", other)
    make_adapter(place / "medusa", tiny, kind="medusa")
    _broken_copies(place, tiny)
    rows = [{"prompt": f"say {word}", "reference": word} for word in ("one", "two", "three", "four") * 4]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "broken.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (place / "misspelt.jsonl").write_text('{"promt": "fine"}\n')
    (place / "recipe.yaml").write_text(json.dumps(RECIPE))
    (place / "scratch.yaml").write_text(json.dumps(SCRATCH))
    (place / "typo.yaml").write_text(json.dumps(RECIPE | {"held_bak": 3}))
    (place / "dev.jsonl").write_text('{"mr": "name[Oak]", "ref": "Oak."}\n')
    return place


def _respell(tokenizer: Path) -> None:
    """Let two ids change places."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    tokenizer.write_text(json.dumps(content), encoding="utf-8")


def _broken_copies(place: Path, tiny: Path) -> None:
    (place / "config-only").mkdir()
    shutil.copy(tiny / "config.json", place / "config-only")
    shutil.copytree(tiny, place / "truncated")
    weights = place / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(tiny, place / "no-shard")
    (place / "no-shard" / "model.safetensors").unlink()
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (place / "no-shard" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(tiny, place / "no-tokenizer")
    (place / "no-tokenizer" / "tokenizer.json").unlink()
    (place / "half-json").mkdir()
    (place / "half-json" / "config.json").write_text((tiny / "config.json").read_text()[:100])


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "here"
    shutil.copytree(original, copy)
    monkeypatch.chdir(copy)
    return copy


def files(place: Path) -> dict[str, bytes | None]:
    """Everything under a folder, hidden files included; None for folders."""
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in place.rglob("*")}


GENERATE = ("generate", "Hello", "--model", "tiny")
WRONG: Mapping[str, tuple[Sequence[str], int, str]] = {
    "missing checkpoint": (("generate", "Hi", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "a file for a checkpoint": (("generate", "Hi", "--model", "rows.jsonl"), FAILED, "is a file; a checkpoint is a"),
    "a configuration without weights": (("generate", "Hi", "--model", "config-only"), FAILED, "no model.safetensors"),
    "half a configuration": (("generate", "Hi", "--model", "half-json"), FAILED, "not readable JSON"),
    "truncated weights": (("generate", "Hi", "--model", "truncated"), FAILED, "is truncated or not safetensors"),
    "missing shard": (("generate", "Hi", "--model", "no-shard"), FAILED, "model-00001-of-00002.safetensors"),
    "no tokenizer": (("generate", "Hi", "--model", "no-tokenizer"), FAILED, "has no tokenizer"),
    "check, missing checkpoint": (("check", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "inspect, truncated weights": (("inspect", "truncated"), FAILED, "is truncated or not safetensors"),
    "widen, truncated weights": (("widen", "out", "--model", "truncated"), FAILED, "is truncated or not safetensors"),
    "bench, missing checkpoint": (("bench", "decode", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "demo, missing checkpoint": (("demo", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "chat, missing checkpoint": (("chat", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "unknown flag": ((*GENERATE, "--metod", "plain"), USAGE, "no option --metod; did you mean --method?"),
    "unknown flag of a group": (("bench", "decode", "--repeat", "1"), USAGE, "did you mean --repeats?"),
    "unknown command": (("genrate",), USAGE, "Did you mean 'generate'?"),
    "prompt beyond the context": (("generate", LONG, "--model", "tiny"), USAGE, "the context of this model holds 256"),
    "answer beyond the context": ((*GENERATE, "--max-new-tokens", "300"), USAGE, "the context holds 256"),
    "empty prompt": (("generate", "", "--model", "tiny"), USAGE, "the prompt is empty"),
    "empty stdin": (("generate", "-", "--model", "tiny"), USAGE, "the prompt is empty"),
    "temperature below zero": ((*GENERATE, "--temperature", "-0.5"), USAGE, "temperature must be >= 0, found -0.5"),
    "temperature that is no number": ((*GENERATE, "--temperature", "nan"), USAGE, "temperature must be >= 0"),
    "top-p beyond one": ((*GENERATE, "--top-p", "1.5"), USAGE, "top_p must be in (0, 1], found 1.5"),
    "no new tokens": ((*GENERATE, "--max-new-tokens", "0"), USAGE, "max_new_tokens must be at least 1, found 0"),
    "empty stop string": ((*GENERATE, "--stop-strings", ""), USAGE, "a stop string must not be empty"),
    "method that is not built": ((*GENERATE, "--method", "eagle"), USAGE, "not built yet; use one of auto, plain"),
    "unknown method": ((*GENERATE, "--method", "multirat"), USAGE, "did you mean 'multirate'?"),
    "method without its adapter": ((*GENERATE, "--method", "multirate"), FAILED, "vivace train multirate --model"),
    "method without its model": ((*GENERATE, "--method", "draft"), FAILED, "--draft-model"),
    "adapter of another base": ((*GENERATE, "--adapter", "of-other"), FAILED, "was trained on base"),
    "unused adapter of another base": (
        (*GENERATE, "--adapter", "of-other", "--method", "plain"),
        FAILED,
        "was trained on base",
    ),
    "adapter that is not there": ((*GENERATE, "--adapter", "none"), FAILED, "no adapter directory none"),
    "adapter that is a checkpoint": ((*GENERATE, "--adapter", "other"), FAILED, "not an adapter's configuration"),
    "adapter of a method to come": (
        (*GENERATE, "--adapter", "medusa"),
        USAGE,
        "an adapter for 'medusa'; this version uses adapters for multirate",
    ),
    "two adapters for a method": (
        (*GENERATE, "--adapter", "a=adapter", "--adapter", "b=adapter"),
        USAGE,
        "are both adapters for multirate",
    ),
    "other tokenizer": ((*GENERATE, "--draft-model", "respelt"), FAILED, "the tokenizers differ in"),
    "missing draft model": ((*GENERATE, "--draft-model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "unknown device": ((*GENERATE, "--device", "tpu"), USAGE, "device 'tpu' is not built yet"),
    "unknown dtype": ((*GENERATE, "--dtype", "int8"), USAGE, "weights cannot be 'int8'"),
    "unknown kernels": ((*GENERATE, "--kernels", "fast"), USAGE, "kernels must be auto or torch"),
    "missing prompt file": (("generate", "--prompt-file", "no.jsonl", "--model", "tiny"), FAILED, "no such file"),
    "broken line of a prompt file": (
        ("generate", "--prompt-file", "broken.jsonl", "--model", "tiny"),
        USAGE,
        "broken.jsonl, line 2: not JSON",
    ),
    "misspelt key of a prompt file": (("check", "tiny", "--prompts", "misspelt.jsonl"), USAGE, "did you mean 'prompt'"),
    "missing prompts": (("bench", "decode", "--model", "tiny", "--prompts", "no.jsonl"), FAILED, "no such file"),
    "bench without its baseline": (("bench", "decode", "--model", "tiny", "--methods", "lookup"), USAGE, "add it"),
    "bench of an unknown method": (
        ("bench", "decode", "--model", "tiny", "--methods", "plain,lokup", "--limit", "1"),
        USAGE,
        "did you mean 'lookup'?",
    ),
    "bench of an unknown peer": (
        ("bench", "decode", "--model", "tiny", "--peers", "transformer", "--limit", "1"),
        USAGE,
        "did you mean 'transformers'?",
    ),
    "unknown recipe": (("train", "multrate", "--out", "out", "--data", "rows.jsonl"), FAILED, "multirate"),
    "unknown recipe key": (
        ("train", "typo.yaml", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "unknown key held_bak; did you mean 'held_back'?",
    ),
    "unknown key on the line": (
        ("train", "recipe.yaml", "loop.stepz=3", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "unknown key loop.stepz; did you mean 'steps'?",
    ),
    "recipe of another kind": (
        ("train", "recipe.yaml", "kind=medusa", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "a recipe's kind is decoder or multirate, found 'medusa'",
    ),
    "training without data": (("train", "recipe.yaml", "--model", "tiny", "--out", "out"), USAGE, "--data FILE"),
    "training without a place": (("train", "recipe.yaml", "--data", "rows.jsonl"), USAGE, "--out DIR"),
    "training on a broken line": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--data", "broken.jsonl"),
        USAGE,
        "broken.jsonl, line 2: not JSON",
    ),
    "training a missing base": (
        ("train", "recipe.yaml", "--model", "nowhere", "--out", "out", "--data", "rows.jsonl"),
        FAILED,
        "no checkpoint directory nowhere",
    ),
    "a gate above the model": (
        ("train", "recipe.yaml", "adapter.gate=9", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "gate 9 must lie below the top of a model of 2 layers",
    ),
    "a decoder on a device": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--device", "cuda"),
        USAGE,
        "--device",
    ),
    "a decoder in a dtype": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--dtype", "float32"),
        USAGE,
        "--dtype",
    ),
    "a decoder from a shape and a base": (
        ("train", "scratch.yaml", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "one of the two",
    ),
    "data without a source": (("data", "e2e", "nowhere", "out"), FAILED, "no train.jsonl[.gz]"),
    "data of another task": (
        ("data", "wikisql", "dev.jsonl", "out"),
        FAILED,
        "dev.jsonl, line 1: not a row of wikisql",
    ),
    "data of no task": (("data", "e2f", "dev.jsonl", "out"), USAGE, "did you mean 'e2e'?"),
    "data that is no text": (("data", "e2e", "tiny/model.safetensors", "out", "--split", "dev"), FAILED, "UTF-8"),
    "data of an unknown split": (("data", "e2e", "dev.jsonl", "out", "--split", "tset"), USAGE, "no split 'tset'"),
    "a twin as wide": (("widen", "out", "--model", "tiny", "--factor", "1"), USAGE, "at least 2, found 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_changes(cli: Cli, place: Path, name: str) -> None:
    words, status, complaint = WRONG[name]
    before = files(place)
    outcome = cli(*words, "--quiet")
    assert complaint in outcome.err
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (status, "", 1)
    assert outcome.err.startswith("error: ")
    assert "not expected" not in outcome.err
    assert files(place) == before


@pytest.mark.parametrize("name", ["truncated weights", "unknown key on the line"])
def test_a_process_ends_the_same_way(place: Path, name: str) -> None:
    words, status, complaint = WRONG[name]
    before = files(place)
    done = process(place, "--quiet", *words)
    assert complaint in done.stderr
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
    assert files(place) == before


def process(place: Path, *words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own; ``code`` runs first."""
    code += "\nfrom vivace.cli.app import main; main()"
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, cwd=place, capture_output=True, text=True, check=False)

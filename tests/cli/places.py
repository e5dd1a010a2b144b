"""A folder of real files, good and broken, in which commands run; nothing is faked there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny_checkpoints import make_adapter, make_checkpoint

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

Cli = Callable[..., "Outcome"]


RECIPE = {
    "kind": "multirate",
    "adapter": {"exit_layer": 1, "rank": 4, "bottleneck": 8},
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
    make_adapter(place / "nova", tiny, kind="nova")
    _broken_copies(place, tiny)
    rows = [{"prompt": f"say {word}", "reference": word} for word in ("one", "two", "three", "four") * 4]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    letters = [{"prompt": letter, "reference": letter} for letter in "abcdefg"]
    (place / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in letters))
    (place / "broken.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (place / "misspelt.jsonl").write_text('{"promt": "fine"}\n')
    (place / "asked.jsonl").write_text(
        '{"prompt": "fine", "reference": "yes"}\n{"messages": [{"role": "user", "content": "fine"}]}\n'
    )
    (place / "talk.jsonl").write_text('{"messages": [{"role": "user", "content": "fine"}], "reference": "yes"}\n' * 9)
    (place / "recipe.yaml").write_text(json.dumps(RECIPE))
    (place / "scratch.yaml").write_text(json.dumps(SCRATCH))
    (place / "typo.yaml").write_text(json.dumps(RECIPE | {"held_bak": 3}))
    (place / "begun" / "run").mkdir(parents=True)
    written = {"prompt": "say", "reference": "one", "model": "0" * 16, "tokens": 1, "draw": 0, "elapsed_s": 1.0}
    (place / "begun" / "run" / "own.jsonl").write_text(json.dumps(written) + "\n")
    (place / "unasked.jsonl").write_text('{"messages": [{"role": "assistant", "content": "fine"}]}\n')
    asked, told = ({"role": role, "content": "fine"} for role in ("user", "tool"))
    (place / "stranger.jsonl").write_text(json.dumps({"messages": [asked, told]}) + "\n")
    (place / "cut.jsonl").write_text(json.dumps(written)[:-9])
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


MAIN = "from vivace.cli.app import main; main()"


def process(place: Path, *words: str, code: str = MAIN) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, a command line unless told otherwise."""
    line = [sys.executable, "-c", code, *words]
    done = subprocess.run(line, cwd=place, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return subprocess.CompletedProcess(line, done.returncode, done.stdout.decode(), done.stderr.decode())

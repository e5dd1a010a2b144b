"""The class of a tokenizer is found once, and a later process asks it directly for the same tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.checkpoint.test_tokenizer import byte_fallback, byte_level
from vivace.checkpoint import tokenizer_class
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.checkpoint.tokenizer_class import open_tokenizer
from vivace.files import cache_folder

SPELLED = ["<s>", "</s>", "<unk>", "<pad>", "Ġ", "▁", *"abcdefgh", "ab", "cd", "▁a", "Ġc"]
LETTERS = {letter: place for place, letter in enumerate(SPELLED)}
MERGES = [("a", "b"), ("c", "d"), ("▁", "a"), ("Ġ", "c")]
PIECES = [(piece, -float(place)) for piece, place in LETTERS.items()]
FAMILIES: dict[str, tuple[str, Any]] = {
    "any": ("llama", lambda: byte_level()),
    "spaces of its own": ("llama", lambda: byte_fallback()),
    "gpt2": ("gpt2", lambda: transformers.GPT2Tokenizer(vocab=LETTERS, merges=MERGES, unk_token="<unk>")),
    "llama": ("llama", lambda: transformers.LlamaTokenizer(vocab=LETTERS, merges=MERGES)),
    "llama as gemma": ("gemma3_text", lambda: transformers.LlamaTokenizer(vocab=LETTERS, merges=MERGES)),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Tokenizer(vocab=LETTERS, merges=MERGES)),
    "qwen2 as phi3": ("phi3", lambda: transformers.Qwen2Tokenizer(vocab=LETTERS, merges=MERGES)),
    "gemma": ("gemma", lambda: transformers.GemmaTokenizer(vocab=LETTERS, merges=MERGES)),
    "t5": ("t5", lambda: transformers.T5Tokenizer(vocab=PIECES, extra_ids=2)),
    "bart": ("bart", lambda: transformers.RobertaTokenizer(vocab=LETTERS, merges=MERGES)),
    "whisper": ("whisper", lambda: transformers.WhisperTokenizer(vocab=LETTERS, merges=MERGES)),
    "no model type": ("", lambda: transformers.GPT2Tokenizer(vocab=LETTERS, merges=MERGES, unk_token="<unk>")),
}


def write(folder: Path, family: str) -> Path:
    """Save a tokenizer as a checkpoint of that family has it."""
    model_type, make = FAMILIES[family]
    make().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    return folder


def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which every folder goes that ``AutoTokenizer`` is asked about."""
    seen: list[str] = []
    original = transformers.AutoTokenizer.from_pretrained

    def listen(name: str, **settings: Any) -> Any:
        seen.append(name)
        return original(name, **settings)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", listen)
    return seen


def state(inner: Any) -> dict[str, Any]:
    """Return everything that a tokenizer is: what it does to text, and its settings."""
    settings = {name: repr(value) for name, value in inner.init_kwargs.items()}
    for name in ("padding_side", "truncation_side", "model_max_length", "model_input_names", "chat_template"):
        settings[name] = repr(getattr(inner, name))
    return settings | {
        "class": type(inner),
        "backend": inner.backend_tokenizer.to_str(),
        "tokens": inner.special_tokens_map,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_alone_opens_the_same_tokenizer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = write(tmp_path, family), asked(monkeypatch)
    first, second = open_tokenizer(folder), open_tokenizer(folder)
    assert seen == [str(folder)]
    assert state(second) == state(first) == state(transformers.AutoTokenizer.from_pretrained(str(folder)))
    assert second("ab cd efgh\n ab").input_ids == first("ab cd efgh\n ab").input_ids


def test_the_same_files_elsewhere_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asked(monkeypatch)
    for name in ("here", "there"):
        load_tokenizer(write(tmp_path / name, "gpt2"))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "qwen2"}'),
        ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        ("tokenizer.json", None),
        ("params.json", "{}"),
    ],
)
def test_other_files_are_looked_into_again(
    name: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = write(tmp_path, "gpt2"), asked(monkeypatch)
    open_tokenizer(folder)
    path = folder / name
    path.write_text(path.read_text() + "\n" if text is None else text)
    open_tokenizer(folder)
    assert len(seen) == 2


def test_another_version_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = write(tmp_path, "gpt2"), asked(monkeypatch)
    open_tokenizer(folder)
    monkeypatch.setattr(tokenizer_class.metadata, "version", lambda name: "1.2.3")
    open_tokenizer(folder)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "transformers.utils.hub:cached_file",
        "transformers.models.gpt2.tokenization_gpt2:Gone",
        "transformers.models.gone:GPT2Tokenizer",
        "transformers.:",
        7,
    ],
)
def test_what_is_no_tokenizer_is_not_asked(name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = write(tmp_path, "gpt2"), asked(monkeypatch)
    open_tokenizer(folder)
    path = cache_folder() / tokenizer_class.FILE
    found = json.loads(path.read_text())
    found["classes"] = dict.fromkeys(found["classes"], name)
    path.write_text(json.dumps(found))
    assert type(open_tokenizer(folder)) is transformers.GPT2Tokenizer
    assert len(seen) == 2
    assert "GPT2Tokenizer" in path.read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "classes": {}}', '{"format": 1, "classes": 3}'])
def test_a_damaged_file_is_made_anew(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen, path = write(tmp_path, "gpt2"), asked(monkeypatch), cache_folder() / tokenizer_class.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for _ in range(2):
        open_tokenizer(folder)
    assert len(seen) == 1


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = write(tmp_path / "model", "gpt2"), asked(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIVACE_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        open_tokenizer(folder)
    assert len(seen) == 2


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_class, "MOST", 2)
    seen = asked(monkeypatch)
    for name in ("gpt2", "llama", "t5", "t5", "llama", "gpt2"):
        folder = tmp_path / name
        open_tokenizer(folder if folder.exists() else write(folder, name))
    assert [Path(name).name for name in seen] == ["gpt2", "llama", "t5", "gpt2"]


def test_a_second_process_imports_no_compiler(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "gpt2")
    code = (
        "import sys; from vivace.checkpoint.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(folder)!r}); "
        "heavy = ('sympy', 'torch._dynamo', 'transformers.configuration_utils'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(run, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout for _ in range(2)
    )
    assert "configuration_utils" in first
    assert second.strip() == "[]"

"""A GGUF file is a checkpoint: the model of transformers it was made of, whatever its architecture and format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.checkpoint.gguf.families import CONFIGS, VOCAB, make, write_file
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.files import open_tensors, resolve
from vivace.checkpoint.gguf.written import write_checkpoint
from vivace.checkpoint.load import load_config, load_decoder
from vivace.errors import CheckpointError, CorruptError, NotFoundError, UnsupportedError, VivaceError
from vivace.evaluate import llamacpp

ARCHITECTURES = list(CONFIGS)


def logits_of_transformers(model: Any, length: int) -> tuple[list[int], torch.Tensor]:
    ids = [(7 * i * i + 3) % VOCAB for i in range(length)]
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make(architecture)
    engine = vivace.load(write_file(architecture, model, tmp_path / "m.gguf"), kernels="torch")
    assert engine.model.dtype == torch.float32
    ids, wanted = logits_of_transformers(model, 60)
    found = engine.logits([ids])[0]
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_reads_these_files_alike(architecture: str, tmp_path: Path) -> None:
    """The files are what llama.cpp takes them for: in float32 it computes the same logits from them.

    It has no window for phi3 and chooses between divisors by its own room for tokens, so the text is shorter than both.
    """
    pytest.importorskip("llama_cpp")
    model = make(architecture)
    path = write_file(architecture, model, tmp_path / "m.gguf")
    ids, wanted = logits_of_transformers(model, 40)
    theirs = llamacpp.LlamaCpp(path, num_threads=1, capacity=len(ids), full_precision=True)
    rows = llamacpp.LlamaRows(ids, range(len(ids)), [0] * len(ids), range(len(ids)))
    assert np.abs(np.stack(theirs.run(rows)) - wanted.numpy()).max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_other_formats_hold_the_same_model(kind: str, tmp_path: Path) -> None:
    model = make("llama")
    path = write_file("llama", model, tmp_path / "m.gguf", kind)
    assert load_decoder(path).dtype == (torch.float32 if kind == "f16" else torch.bfloat16)
    stored = open_tensors(resolve(path))
    for name, values in model.state_dict().items():
        found = stored.tensor(name, torch.float32)
        most = {"f16": 2e-3, "bf16": 8e-3, "q8_0": 0.02, "q4_0": 0.3}[kind]
        assert (found - values).abs().max() <= (0 if values.dim() == 1 else most), name


def test_text_of_a_file_is_that_of_its_folder(tmp_path: Path) -> None:
    """Tokenizer, chat template and end of text included; and every method of a file's model is identical."""
    folder = make_checkpoint(tmp_path / "tiny")
    write_checkpoint(folder, tmp_path / "m.gguf")
    ours, theirs = vivace.load(tmp_path / "m.gguf"), vivace.load(folder)
    assert ours.tokenizer.eos_ids == theirs.tokenizer.eos_ids
    for prompt in ("Hello <|user|> 12345  ünï", "near the river"):
        assert ours.tokenizer.encode_prompt(prompt) == theirs.tokenizer.encode_prompt(prompt)
        plain = [engine.generate([prompt], max_new_tokens=24, method="plain")[0] for engine in (ours, theirs)]
        assert plain[0].text == plain[1].text
        assert ours.generate([prompt], max_new_tokens=24, method="lookup")[0].text == plain[0].text
    assert base_hash(tmp_path / "m.gguf") != base_hash(folder)
    assert len(base_hash(tmp_path / "m.gguf")) == 64


def test_notes_tell_what_became_of_the_weights(tmp_path: Path) -> None:
    model = make("qwen2")
    path = write_file("qwen2", model, tmp_path / "m.gguf", "q8_0")
    kept = "the q8_0 weights of m.gguf keep the codes and scales of the file"
    assert any(note.startswith(kept) for note in vivace.load(path).notes)
    assert "the q8_0 weights of m.gguf are decoded to bfloat16" in vivace.load(path, kernels="torch").notes
    assert any("rounded once more, to q4" in note for note in vivace.load(path, weights="q4").notes)
    assert not vivace.load(write_file("qwen2", model, tmp_path / "n.gguf", "bf16")).notes[1:]


def test_divisors_of_no_published_model_are_kept(tmp_path: Path) -> None:
    """Divisors that are not those of Llama 3 are taken as they are."""
    model = make("llama")
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 70000.0}
    rope = load_config(write_file("llama", model, tmp_path / "m.gguf")).rope(0)
    assert rope.kind == "longrope"
    assert rope.short_factors == rope.long_factors
    assert max(rope.short_factors) == 8.0
    assert load_config(write_file("llama", make("llama"), tmp_path / "n.gguf")).rope(0).kind == "llama3"


def test_a_folder_is_made_once_and_anew_for_another_file(tmp_path: Path, cache: Path) -> None:
    path = write_file("qwen2", make("qwen2"), tmp_path / "m.gguf")
    folder = resolve(path)
    made = (folder / "config.json").stat().st_mtime_ns
    assert folder.is_relative_to(cache)
    assert resolve(path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    stamp = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(stamp, stamp))
    assert resolve(path) != folder
    with pytest.raises(CorruptError, match="has changed since it was opened; open it again by its own name"):
        open_tensors(folder)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"m.gguf is no longer there"):
        open_tensors(folder)


def change(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = make("qwen2")

    def fresh(**more: Any) -> Path:
        return write_file("qwen2", model, path, "q8_0", **more)

    cases: list[tuple[Path, type[VivaceError], str]] = []

    def expect(kind: type[VivaceError], message: str) -> None:
        with pytest.raises(kind, match=message) as raised:
            load_decoder(path)
        assert "\n" not in str(raised.value)
        cases.append((path, kind, message))

    fresh()
    data = path.read_bytes()
    for length in (0, 3, 4, 20, 100, 700, len(data) // 3, len(data) - 40):
        path.write_bytes(data[:length])
        expect(CorruptError, "is not a GGUF file|is truncated")
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + data[8:])
    expect(UnsupportedError, "is GGUF version 1; little-endian files of versions 2 and 3 are read")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + data[8:])
    expect(UnsupportedError, "is big-endian")
    path.write_bytes(b"PK" + data)
    expect(CorruptError, "is not a GGUF file")
    fresh(**{"general.architecture": "mamba"})
    expect(UnsupportedError, "architecture 'mamba'; read are llama, qwen2, qwen3, gemma2, gemma3, phi3, olmo2")
    fresh(**{"qwen2.rope.scaling.type": "longrope"})
    expect(UnsupportedError, "rope.scaling.type = 'longrope' is not supported; supported: none, linear, yarn")
    fresh(**{"qwen2.attention.surprise": 3})
    expect(UnsupportedError, "unknown to vivace, which may change the mathematics: qwen2.attention.surprise = 3")
    fresh(**{"qwen2.expert_count": 8})
    expect(UnsupportedError, "is a mixture of 8 experts")
    fresh(**{"split.count": 3})
    expect(UnsupportedError, "is one of 3 parts")
    fresh(**{"tokenizer.ggml.model": "rwkv"})
    expect(UnsupportedError, "a tokenizer of the kind 'rwkv'")
    change(fresh(), b"qwen2.block_count", b"qwen2.block_coant")
    expect(CheckpointError, "has no key qwen2.block_count; the file is incomplete")
    change(fresh(), b"blk.1.attn_k.bias", b"blk.1.attn_z.bias")
    expect(CheckpointError, r"missing: model.layers.1.self_attn.k_proj.bias; unexpected: blk.1.attn_z.bias")
    assert len(cases) == 19


def test_a_hub_file_is_named_with_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    path = write_file("qwen2", make("qwen2"), tmp_path / "m.gguf")

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "owner/name"
        if allow_patterns != ["m.gguf"]:
            raise errors.LocalEntryNotFoundError("no")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_config("owner/name:m.gguf").num_layers == 3
    with pytest.raises(NotFoundError, match="no local copy of the Hub repository owner/name"):
        load_config("owner/name:other.gguf")
    path.rename(tmp_path / "n.gguf")
    with pytest.raises(NotFoundError, match=r"Hub repository owner/name nor its local copy has a file m\.gguf"):
        load_config("owner/name:m.gguf")
    (tmp_path / "n.gguf").rename(path)
    with pytest.raises(NotFoundError, match=r"there is no file .*nowhere.gguf"):
        load_config(tmp_path / "nowhere.gguf")
    with pytest.raises(NotFoundError, match=r"has no config.json; for its GGUF file give .*m.gguf"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["owner/name:Q4_K_M", "owner/name:"])
def test_a_file_of_a_repository_is_named_in_full(name: str) -> None:
    with pytest.raises(NotFoundError, match=r"a GGUF file of a repository is OWNER/NAME:FILE\.gguf"):
        load_config(name)


def test_advice_names_the_file_and_no_folder_of_the_cache(tmp_path: Path) -> None:
    path = write_file("qwen2", make("qwen2"), tmp_path / "m.gguf")
    engine = vivace.load(path, kernels="torch")
    for method, advice in {"multirate": f"--model {path} --data FILE --out DIR", "draft": "give --draft-model"}.items():
        with pytest.raises(NotFoundError, match=advice) as caught:
            engine.generate([[3, 4]], method=method, max_new_tokens=2)
        assert str(engine.folder) not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIVACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="could not be written"):
        resolve(write_file("qwen2", make("qwen2"), tmp_path / "m.gguf"))


def test_inspect_lists_formats_of_the_file(tmp_path: Path) -> None:
    from vivace.cli.inspect import model_facts

    path = write_file("gemma3", make("gemma3"), tmp_path / "m.gguf", "q8_0")
    facts = model_facts(resolve(path))
    assert facts["dtypes"] == ["float32", "q8_0"]
    assert facts["file"] == str(path.resolve())
    assert facts["bytes"] < path.stat().st_size
    assert json.dumps(facts["tensors"]).count("q8_0") == 7 * 7 + 1


def test_transformers_is_not_compared_on_a_file(tmp_path: Path) -> None:
    from vivace.evaluate.peers import _load

    path = write_file("qwen2", make("qwen2"), tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match="and this model is a GGUF file"):
        _load(resolve(path), "auto", torch.device("cpu"))

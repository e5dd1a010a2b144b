"""What is saved is read by plain transformers, and a failed save leaves what was there."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.parity.families import CONFIGS, make
from vivace.checkpoint import save
from vivace.checkpoint.adapters import STORE, STORE_DATA
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.save import copy_text_files, save_decoder, write_checkpoint
from vivace.errors import CheckpointError, MismatchError

Saved = Callable[[str], Path]


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_round_trip_through_transformers(saved: Saved, tmp_path: Path, family: str) -> None:
    save_decoder(load_decoder(saved(family)), tmp_path / "out", config_of(saved(family)))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = dict(make(family).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_dtype_of_what_was_trained(llama: Path, tmp_path: Path) -> None:
    save_decoder(load_decoder(llama, "bfloat16"), tmp_path / "out", config_of(llama))
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert load_decoder(tmp_path / "out").dtype == torch.bfloat16


def test_shards_are_replaced_and_other_files_stay(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    make("llama", seed=5).save_pretrained(target, max_shard_size="20KB")
    (target / "notes.txt").write_text("mine")
    decoder = load_decoder(llama)
    save_decoder(decoder, target, config_of(llama))
    assert [file.name for file in target.glob("*.safetensors*")] == ["model.safetensors"]
    assert (target / "notes.txt").read_text() == "mine"
    assert torch.equal(load_decoder(target).embedding, decoder.embedding)


@pytest.mark.parametrize("shards", [None, [], 3, "damaged"])
def test_an_index_that_names_no_shards_is_replaced(llama: Path, tmp_path: Path, shards: object) -> None:
    target, decoder = tmp_path / "out", load_decoder(llama)
    target.mkdir()
    text = '{"weight_ma' if shards == "damaged" else json.dumps({"weight_map": shards})
    (target / save.INDEX).write_text(text)
    save_decoder(decoder, target, config_of(llama))
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]


def test_what_an_index_names_elsewhere_stays(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only shards beside it are an older model's; the folder may be the one that a process is in."""
    target, others = tmp_path / "out", [tmp_path / "victim.safetensors", tmp_path / "out" / "notes.txt"]
    target.mkdir()
    for other in others:
        other.write_text("mine")
    named = ["../victim.safetensors", str(others[0]), "notes.txt", "old.safetensors"]
    (target / "old.safetensors").write_text("theirs")
    (target / save.INDEX).write_text(json.dumps({"weight_map": dict(enumerate(named))}))
    decoder = load_decoder(llama)
    monkeypatch.chdir(target)
    save_decoder(decoder, ".", config_of(llama))
    assert [other.read_text() for other in others] == ["mine", "mine"]
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert [file.name for file in tmp_path.glob("*.partial")] == []


def test_an_older_models_texts_go_where_new_ones_are_written(llama: Path, tmp_path: Path) -> None:
    """A template or end tokens of the model that lay there before would change how this one answers."""
    source, target = tmp_path / "source", tmp_path / "out"
    for folder, names in ((source, ["tokenizer.json"]), (target, ["generation_config.json", "chat_template.jinja"])):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")
    (target / "notes.txt").write_text("mine")
    for name in (STORE, STORE_DATA):
        (target / name).write_text("{}")  # a store would be opened in place of the new weights
    decoder, config = load_decoder(llama), config_of(llama)
    save_decoder(decoder, target, config)
    assert (target / "generation_config.json").exists(), "no text was written, so none is of another model"
    write_checkpoint(decoder, config, source, target)
    names = ["config.json", "model.safetensors", "notes.txt", "tokenizer.json"]
    assert sorted(file.name for file in target.iterdir()) == names


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "spiece.model", "source.spm", "added_tokens.json"])
def test_any_tokenizer_goes_along(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / name).write_text("{}")
    copy_text_files(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "{}"


def test_another_models_config(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="describes another model"):
        save_decoder(load_decoder(llama), tmp_path / "out", config_of(llama) | {"rms_norm_eps": 1e-3})
    assert not (tmp_path / "out").exists()


def test_a_full_disk_loses_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    decoder = load_decoder(llama)
    save_decoder(decoder, target, config_of(llama))
    before = {file.name: file.read_bytes() for file in target.iterdir()}

    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_decoder(decoder, target, config_of(llama))
    assert "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_saving_over_the_file_that_is_mapped(llama: Path) -> None:
    """The map keeps the old file alive."""
    decoder = load_decoder(llama)
    before = decoder.final_norm.weight.clone()
    decoder.embedding = torch.nn.Parameter(decoder.embedding + 1)
    save_decoder(decoder, llama, config_of(llama))
    assert torch.equal(decoder.final_norm.weight, before)
    assert torch.equal(load_decoder(llama).embedding, decoder.embedding)

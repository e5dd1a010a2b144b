"""An adapter is complete, belongs to one base, and says so when it does not."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.families import make
from vivace.checkpoint.adapters import base_hash, load_adapter, save_adapter
from vivace.errors import CorruptError, MismatchError, NotFoundError

TENSORS = {"up": torch.arange(12.0).view(3, 4), "down": torch.ones(4, 3, dtype=torch.bfloat16)}


def save(folder: Path, base: str = "ab" * 32) -> None:
    save_adapter(folder, "multirate", base, {"steps": 10}, {"rank": 3}, TENSORS)


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path / "a")
    config, tensors = load_adapter(tmp_path / "a", "ab" * 32)
    assert config == {"kind": "multirate", "base_hash": "ab" * 32, "plan": {"steps": 10}, "config": {"rank": 3}}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["adapter_model.safetensors", "config.json"]
    assert load_adapter(tmp_path / "a")[0] == config


def test_another_base(tmp_path: Path) -> None:
    save(tmp_path / "a")
    with pytest.raises(MismatchError, match="trained on base abababababab, this model is cdcdcdcdcdcd"):
        load_adapter(tmp_path / "a", "cd" * 32)


def test_broken_adapters(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no adapter directory"):
        load_adapter(tmp_path / "none")
    save(folder := tmp_path / "a")
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(CorruptError, match="truncated"):
        load_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"no adapter_model\.safetensors"):
        load_adapter(folder)
    (folder / "config.json").write_text('{"kind": "lora"}')
    with pytest.raises(CorruptError, match="lacks base_hash, config, plan"):
        load_adapter(folder)
    (folder / "config.json").write_text('{"kind": "lora", "base_hash": null, "plan": {}, "config": {}}')
    with pytest.raises(CorruptError, match="base_hash must be a text, found None"):
        load_adapter(folder, "ab")
    (folder / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        load_adapter(folder)


def changed(folder: Path, name: str, at: int | None = None) -> str:
    """Hash after one number of a tensor was changed, or one of its dimensions dropped."""
    tensors: dict[str, Tensor] = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    if at is None:
        tensors[name] = tensors[name].view(-1)
    else:
        tensors[name].view(-1)[at] += 1
    shutil.copytree(folder, other := folder.parent / f"other{at}")
    save_file(tensors, other / "model.safetensors")
    return base_hash(other)


@pytest.mark.parametrize("part", ["plan", "config"])
@pytest.mark.parametrize("found", [None, [], 3])
def test_parts_that_are_no_objects(tmp_path: Path, part: str, found: object) -> None:
    save_adapter(tmp_path, "stub", "abc", {}, {}, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: found}))
    with pytest.raises(CorruptError, match=f"config.json: {part} must be an object, found"):
        load_adapter(tmp_path)


def test_the_hash_sees_another_model(llama: Path) -> None:
    first = base_hash(llama)
    assert len(first) == 64
    name = "model.layers.1.mlp.down_proj.weight"
    hashes = {first, *(changed(llama, name, at) for at in (None, 0, -1))}
    assert len(hashes) == 4
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 3e-5}))
    assert base_hash(llama) not in hashes


def test_the_hash_does_not_see_packaging(llama: Path, tmp_path: Path) -> None:
    first = base_hash(llama)
    make("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert base_hash(tmp_path / "sharded") == first
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "use_cache": False}, indent=9))
    assert base_hash(llama) == first


def test_the_hash_takes_milliseconds(tmp_path: Path) -> None:
    """Of 64 MiB it reads a few kilobytes; hashing them all would take tens of milliseconds at best."""
    save_file({f"w{i}": torch.zeros(1 << 21, dtype=torch.bfloat16) for i in range(16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    took = []
    for _ in range(5):
        started = time.perf_counter()
        base_hash(tmp_path)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.01


def test_the_hash_of_half_a_file(llama: Path) -> None:
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CorruptError, match="truncated"):
        base_hash(llama)

"""Whole checkpoints of other programs: what loads, what is said about it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vivace
from tests.checkpoint.quantized.models import STORED, write
from vivace.checkpoint.files import open_tensors, read_json
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.save import save_decoder
from vivace.cli.inspect import model_facts
from vivace.errors import CorruptError, MismatchError, UnsupportedError, VivaceError
from vivace.storage.convert import write_store

PROMPT = [5, 17, 40, 3, 88, 21, 60, 9]


@pytest.mark.parametrize("kind", STORED)
def test_a_quantized_folder_is_its_decoded_twin(kind: str, tmp_path: Path) -> None:
    stored, plain = write(kind, tmp_path, tie_word_embeddings=kind == "mlx")
    ours, theirs = load_decoder(stored, "float32"), load_decoder(plain, "float32")
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7), name
    engine = vivace.load(stored, kernels="torch", dtype="float32")
    twin = vivace.load(plain, kernels="torch", dtype="float32")
    answers = [e.generate([PROMPT], max_new_tokens=12, method="plain")[0].token_ids for e in (engine, twin)]
    assert answers[0] == answers[1]


def test_what_became_of_the_weights_is_said(tmp_path: Path) -> None:
    stored, plain = write("fp8", tmp_path)
    assert vivace.load(stored, dtype="float32").notes[0] == "the fp8 weights are decoded to float32"
    assert vivace.load(stored).notes[0] == "the fp8 weights are decoded to bfloat16"
    again = vivace.load(stored, weights="q4").notes[0]
    assert again == "the fp8 weights are decoded to bfloat16 and rounded once more, to q4"
    assert "weights are" not in vivace.load(plain).notes[0]


def test_inspect_lists_formats_and_bytes(tmp_path: Path) -> None:
    stored, plain = write("gptq", tmp_path)
    facts, dense = model_facts(stored), model_facts(plain)
    assert facts["dtypes"] == ["float16", "gptq-4"]
    assert facts["parameters"] == dense["parameters"]
    assert facts["bytes"] == sum(tensor.nbytes for tensor in load_file(stored / "model.safetensors").values())


def test_what_is_written_from_it_is_plain(tmp_path: Path) -> None:
    stored, plain = write("awq", tmp_path)
    store = write_store(stored, tmp_path / "store", layout="layers", dtype="float32")
    assert "quantization_config" not in read_json(store.folder / "config.json")
    save_decoder(load_decoder(stored, "float32"), tmp_path / "saved", read_json(stored / "config.json"))
    saved = load_decoder(tmp_path / "saved")
    theirs = load_decoder(plain, "float32")
    assert torch.allclose(saved.layers[1].o.weight, theirs.layers[1].o.weight, rtol=1e-6, atol=1e-7)


def change(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """Write other settings, and other tensors."""
    raw = read_json(folder / "config.json")
    raw["quantization_config"] = raw.get("quantization_config", {}) | config
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if tensors:
        found = load_file(folder / "model.safetensors") | tensors
        save_file({name: each.contiguous() for name, each in found.items()}, folder / "model.safetensors")
    return folder


NAME = "model.layers.1.mlp.up_proj"
SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 5}, "bits = 5, which is not read; read are 2, 3, 4, 8"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ("gptq", {"quant_method": "gtpq"}, "did you mean 'gptq'"),
    ("gptq", {"quant_method": "aqlm"}, "quant_method 'aqlm', which is not read"),
    ("gptq", {"group_size": 48}, "do not cover 128 inputs"),
    ("gptq", {"group_size": None}, "group_size = None, which is no whole number"),
    ("awq", {"group_size": "all"}, "group_size = 'all', which is no whole number"),
    ("mlx", {"group_size": "a", "bits": 4}, "group_size = 'a', which is no whole number"),
    ("fp8", {"weight_block_size": [16]}, r"\[16\] for the shape of a block; it has two numbers"),
    ("awq", {"version": "gemv"}, "version = 'gemv'"),
    ("awq", {"group_size": 128}, "do not cover 64 inputs"),
    ("mlx", {"mode": "mxfp4", "group_size": 32, "bits": 4}, "mode = 'mxfp4'"),
    ("int8", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
]


@pytest.mark.parametrize(("kind", "settings", "said"), SETTINGS)
def test_settings_that_are_not_read_are_named(kind: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder, _ = write(kind, tmp_path)
    if kind == "gptq" and "group_size" in settings:  # the group of each input would tell the size
        tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.endswith("g_idx")}
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(VivaceError, match=said) as caught:
        load_decoder(change(folder, settings))
    assert "\n" not in str(caught.value)


TENSORS: list[tuple[str, str, Any, str]] = [
    ("gptq", "scales", lambda t: t.index_fill(0, torch.tensor([0]), torch.inf), "infinite or not a number"),
    ("gptq", "g_idx", lambda t: t + 1, "g_idx does not divide 64 inputs into 2 groups"),
    ("gptq", "g_idx", lambda t: t * 0, "g_idx does not divide 64 inputs into 2 groups"),
    ("gptq", "qweight", lambda t: t[:-1], "no GPTQ matrix"),
    ("gptq", "scales", lambda t: t[0], "scales is no matrix"),
    ("awq", "qzeros", lambda t: t[:, :-1], "no AWQ matrix"),
    ("int8", "SCB", lambda t: t * torch.nan, "infinite or not a number"),
    ("int8", "weight", lambda t: t.half(), "no int8 matrix"),
    ("fp8", "weight_scale_inv", lambda t: t[:, :1], "do not cover the matrix"),
    ("fp8", "weight", lambda t: t.float(), "float8_e4m3fn is expected"),
]


@pytest.mark.parametrize(("kind", "part", "harm", "said"), TENSORS)
def test_tensors_that_cannot_be_are_named(kind: str, part: str, harm: Any, said: str, tmp_path: Path) -> None:
    folder, _ = write(kind, tmp_path)
    name = f"{NAME}.{part}"
    change(folder, {}, {name: harm(load_file(folder / "model.safetensors")[name])})
    with pytest.raises((CorruptError, MismatchError), match=said) as caught:
        load_decoder(folder)
    assert NAME in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_whose_weights_are_not_quantized_is_refused(tmp_path: Path) -> None:
    _, plain = write("gptq", tmp_path)
    with pytest.raises(MismatchError, match=r"weights are gptq, and the files have no tensor \*\.qweight"):
        load_decoder(change(plain, STORED["gptq"][0]))


def test_a_missing_part_of_a_matrix_is_named(tmp_path: Path) -> None:
    folder, _ = write("gptq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{NAME}.qzeros"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptError, match=f"{NAME} has no qzeros"):
        load_decoder(folder)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder, _ = write("int8", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="truncated"):
        open_tensors(folder)


def test_nothing_is_compared_with_transformers_that_it_cannot_load(tmp_path: Path) -> None:
    from vivace.evaluate.peers import _load

    folder, _ = write("gptq", tmp_path)
    with pytest.raises(UnsupportedError, match="quantized"):
        _load(folder, "bfloat16", torch.device("cpu"))

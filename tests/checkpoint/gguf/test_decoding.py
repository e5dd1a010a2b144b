"""Blocks of codes are decoded to the numbers of the ``gguf`` package, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vivace.checkpoint.gguf.blocks import KINDS, encode
from vivace.checkpoint.gguf.decoding import TYPES, decode, find_type
from vivace.errors import CorruptError, UnsupportedError

BLOCKS = load_file(Path(__file__).with_name("blocks.safetensors"))
GRIDS = [name for name, kind in TYPES.items() if kind.grid is not None]


def test_every_format_of_blocks_has_a_fixture() -> None:
    assert sorted(GRIDS) == sorted(name.removesuffix(".raw") for name in BLOCKS if name.endswith(".raw"))
    assert len(GRIDS) == 12


@pytest.mark.parametrize("name", GRIDS)
def test_values_are_those_of_the_gguf_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, wanted = BLOCKS[f"{name}.raw"].numpy(), BLOCKS[f"{name}.values"]
    assert raw.shape[1] == TYPES[name].block_bytes
    found = decode(raw.reshape(-1), (2, wanted.numel() // 2), name, "x")
    assert torch.equal(found.view_as(wanted), wanted)
    monkeypatch.setattr("vivace.checkpoint.gguf.decoding.ROWS_BYTES", 1)  # a block at a time
    rounded = decode(raw.reshape(-1), tuple(wanted.shape), name, "x", torch.bfloat16)
    assert torch.equal(rounded, wanted.bfloat16())


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_what_is_written_is_read(name: str) -> None:
    values = torch.linspace(-3, 3, 128).view(2, 64)
    found = decode(encode(values, KINDS[name]), (2, 64), name, "x")
    assert (found.float() - values).abs().max() <= {"q4_0": 0.4, "q8_0": 0.02, "bf16": 0.01}.get(name, 0.001)


def test_a_scale_that_overflows_is_named() -> None:
    raw = BLOCKS["q4_k.raw"].numpy().copy()
    raw[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CorruptError, match=r"m.gguf: blk.0.ffn_up: a scale of the q4_k weights is infinite"):
        decode(raw.reshape(-1), (1, 512), "q4_k", "m.gguf: blk.0.ffn_up")


def test_other_formats_are_refused_by_name() -> None:
    for code, name in ((16, "IQ2_XXS"), (19, "IQ1_S"), (21, "IQ3_S"), (29, "IQ1_M"), (34, "TQ1_0"), (39, "MXFP4")):
        with pytest.raises(UnsupportedError, match=f"x is {name}, which is not read; read are f32, f16, bf16, q4_0"):
            find_type(code, "x")
    with pytest.raises(CorruptError, match="x has the unknown type 77"):
        find_type(77, "x")

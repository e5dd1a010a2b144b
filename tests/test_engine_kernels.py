"""Native kernels from outside: pinned, reported, refused, and the same text by every method."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.cpu.packed import PackedLinear
from vivace.errors import UnsupportedError
from vivace.kernels.native import NativeBody

PROMPTS = ["abc", "the quick brown fox", "x", "aaaa bbbb aaaa"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kernels"), context=128, layers=4)


@pytest.fixture
def engine(checkpoint: Path, body: NativeBody) -> vivace.Engine:
    return vivace.load(checkpoint, dtype="bfloat16", kernels=body.name)


def test_every_method_gives_the_text_of_plain_decoding(engine: vivace.Engine) -> None:
    plain = engine.generate(PROMPTS, max_new_tokens=24, method="plain", logprobs=True)
    for method in ("lookup", "auto"):
        for batch_size in (1, 4):
            settings = {"max_new_tokens": 24, "method": method, "batch_size": batch_size, "logprobs": True}
            other = engine.generate(PROMPTS, **settings)
            assert [r.token_ids for r in other] == [r.token_ids for r in plain]
            assert [r.logprobs for r in other] == [r.logprobs for r in plain]
    silent = engine.generate(PROMPTS, max_new_tokens=24, method="plain")
    assert [r.token_ids for r in silent] == [r.token_ids for r in plain]


def test_it_is_the_model(engine: vivace.Engine, checkpoint: Path) -> None:
    dense = vivace.load(checkpoint, dtype="bfloat16", kernels="torch")
    ids = [[5, 9, 11, 7, 20, 30, 4]]
    torch.testing.assert_close(engine.logits(ids), dense.logits(ids), atol=0.05, rtol=0.05)
    assert dense.kernels.name == "torch"


def test_said(engine: vivace.Engine, body: NativeBody) -> None:
    assert (engine.kernels.name, engine.kernels.reason) == (body.name, "asked for")
    assert any(isinstance(module, PackedLinear) for module in engine.model.modules())


def test_float32(checkpoint: Path, body: NativeBody) -> None:
    engine = vivace.load(checkpoint, dtype="float32", kernels=body.name)
    assert engine.kernels.name == body.name
    dense = vivace.load(checkpoint, dtype="float32", kernels="torch")
    ids = [[5, 9, 11, 7, 20, 30, 4]]
    torch.testing.assert_close(engine.logits(ids), dense.logits(ids), atol=2e-4, rtol=2e-4)
    settings = {"max_new_tokens": 24, "logprobs": True}
    plain, expected = (each.generate(PROMPTS, **settings, method="plain") for each in (engine, dense))
    assert [r.token_ids for r in plain] == [r.token_ids for r in expected]
    for method in ("lookup", "auto"):
        for batch_size in (1, 4):
            other = engine.generate(PROMPTS, **settings, method=method, batch_size=batch_size)
            assert [r.token_ids for r in other] == [r.token_ids for r in plain]
            assert [r.logprobs for r in other] == [r.logprobs for r in plain]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_stay_so_in_float32(tmp_path: Path, checkpoint: Path, library, kind: torch.dtype) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=kind)
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path)
    engine, dense = (vivace.load(tmp_path, dtype="float32", kernels=name) for name in ("auto", "torch"))
    assert engine.num_bytes < 0.6 * dense.num_bytes
    assert engine.model.dtype == torch.float32
    plain, expected = (e.generate(PROMPTS, max_new_tokens=24, method="plain") for e in (engine, dense))
    assert [r.token_ids for r in plain] == [r.token_ids for r in expected]


def test_quantized_float32_stays_with_torch(checkpoint: Path, body: NativeBody) -> None:
    engine = vivace.load(checkpoint, dtype="float32", weights="int8")
    assert engine.kernels.name == "torch"
    assert "float32" in engine.kernels.reason
    with pytest.raises(UnsupportedError, match="give --dtype bfloat16 or --kernels torch"):
        vivace.load(checkpoint, dtype="float32", weights="int8", kernels=body.name)

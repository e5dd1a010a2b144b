"""Native kernels from outside: pinned, reported, refused, and the same text by every method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def test_float32_stays_with_torch(checkpoint: Path, body: NativeBody) -> None:
    engine = vivace.load(checkpoint, dtype="float32")
    assert engine.kernels.name == "torch"
    assert "bfloat16" in engine.kernels.reason
    with pytest.raises(UnsupportedError, match="give --dtype bfloat16 or --kernels torch"):
        vivace.load(checkpoint, dtype="float32", kernels=body.name)

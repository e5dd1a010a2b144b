"""A screened head from outside: the same texts, its memory counted, refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.cpu import backend
from vivace.core.cpu.low_bit import LowBitLinear
from vivace.core.cpu.packed import PackedLinear, TiedHead
from vivace.errors import UnsupportedError
from vivace.kernels.choice import choose
from vivace.kernels.screen import Screen

PROMPTS = ["abc", "the quick brown fox", "x", "aaaa bbbb aaaa"]
NATIVE = {"dtype": "bfloat16", "screened_head": True}
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "method": "plain", "ignore_eos": True, "do_sample": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if choose().body is None:
        pytest.skip("there are no native kernels here")
    return make_checkpoint(tmp_path_factory.mktemp("screened"), context=128)


def screen_of(engine: vivace.Engine) -> Screen | None:
    head = engine.model.lm_head
    assert isinstance(head, PackedLinear | TiedHead | LowBitLinear)
    return head.screen


@pytest.mark.parametrize("weights", ["bf16", "exact12"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("method", ["plain", "lookup", "lookahead"])
def test_texts_are_the_same(checkpoint: Path, weights: str, batch_size: int, method: str) -> None:
    whole = vivace.load(checkpoint, dtype="bfloat16", weights=weights, screened_head=False)
    screened = vivace.load(checkpoint, weights=weights, **NATIVE)
    settings = {**PLAIN, "method": method, "batch_size": batch_size}
    expected = [result.token_ids for result in whole.generate(PROMPTS, **settings)]
    assert [result.token_ids for result in screened.generate(PROMPTS, **settings)] == expected
    screen = screen_of(screened)
    assert screen is not None
    assert screen.counts[0] > 0, "the head was asked through its screen"


def test_all_logits_are_computed_where_they_are_wanted(checkpoint: Path) -> None:
    whole = vivace.load(checkpoint, dtype="bfloat16", screened_head=False)
    screened = vivace.load(checkpoint, **NATIVE)
    screen = screen_of(screened)
    assert screen is not None
    for wanted in ({"repetition_penalty": 1.3}, {"do_sample": True, "seed": 3}, {"logprobs": True}):
        settings = {**PLAIN, **wanted}
        found, expected = screened.generate(PROMPTS, **settings), whole.generate(PROMPTS, **settings)
        assert [(r.token_ids, r.logprobs) for r in found] == [(r.token_ids, r.logprobs) for r in expected]
        # tokens that native code decided are chosen by the screen, and their log p computed afterwards
        assert "logprobs" in wanted or screen.counts.tolist() == [0, 0, 0]


def test_a_large_head_is_screened_by_itself(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert screen_of(vivace.load(checkpoint, dtype="bfloat16")) is None
    monkeypatch.setattr(backend, "SCREENED_BYTES", 1)
    engine = vivace.load(checkpoint, dtype="bfloat16")
    screen = screen_of(engine)
    assert screen is not None
    assert screen_of(vivace.load(checkpoint, dtype="bfloat16", screened_head=False)) is None
    assert screen_of(vivace.load(checkpoint, dtype="bfloat16", memory="1GiB")) is None, "memory was said to be scarce"
    beside = vivace.load(checkpoint, dtype="bfloat16", screened_head=False)
    assert engine.memory.held_bytes - beside.memory.held_bytes == screen.nbytes + screen.counts.nbytes
    assert isinstance(vivace.load(checkpoint, kernels="torch").model.lm_head, torch.nn.Module | None)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"kernels": "torch"}, "native kernels"),
        ({"weights": "int8"}, "eight bits itself"),
        ({"weights": "q4"}, "eight bits itself"),
    ],
)
def test_it_is_refused_where_it_cannot_be(checkpoint: Path, how: dict[str, str], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        vivace.load(checkpoint, **{**NATIVE, **how})


def test_quantized_drafts_share_its_codes(checkpoint: Path) -> None:
    from vivace.core.cpu.quantized import quantized_copy

    engine = vivace.load(checkpoint, **NATIVE)
    screen = screen_of(engine)
    assert screen is not None
    assert quantized_copy(engine.model.lm_head, "int8").weight is screen.codes
    assert torch.equal(quantized_copy(vivace.load(checkpoint, dtype="bfloat16").model.lm_head, "int8").weight.codes,
                       screen.codes.codes)  # fmt: skip

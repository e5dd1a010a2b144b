"""Greedy output is plain decoding's, token for token and bit for bit, whatever is drafted and whoever joins."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from oracles import plain_text, recomputed_text
from runs import Result, finish
from scripted_drafters import RIGHTNESS, Scripted
from tiny_decoders import VOCAB, prompts

from vivace.core.model import Decoder
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import CapacityError, ConfigError

Models = Callable[..., Decoder]
SHAPES = [(1,), (1, 1, 1, 1), (3,), (3, 2, 1), (2, 2, 2), (1, 3)]


def limits(count: int) -> list[int]:
    return [1 + (7 * i) % 24 for i in range(count)]


@pytest.fixture
def texts(models: Models, dtype: torch.dtype) -> list[list[int]]:
    return [list(t.prompt + t.new) for t in (plain_text(models(dtype), p, 28) for p in prompts(16))]


def test_the_oracle_agrees_with_recomputing_everything(models: Models) -> None:
    model = models(torch.float32)
    distinct = set()
    for prompt in prompts(8):
        text = plain_text(model, prompt, 24)
        assert text.new == recomputed_text(model, prompt, 24)
        distinct |= set(text.new)
    assert len(distinct) > 40, "a decoder that repeats itself proves nothing"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("right", RIGHTNESS)
def test_greedy_output_is_plain_decodings(
    models: Models, dtype: torch.dtype, texts: list[list[int]], right: str, shape: tuple[int, ...]
) -> None:
    model = models(dtype)
    drafter = Scripted(texts, VOCAB, shape=shape, is_right=RIGHTNESS[right], is_ragged=True)
    session = Session(model, num_slots=5, capacity=64, chunk=8, prefill_budget=16)
    wanted = [plain_text_in_chunks(model, p, n, 8) for p, n in zip(prompts(16), limits(16), strict=True)]
    requests = [Request(p, n, drafter, logprobs=True) for p, n in zip(prompts(16), limits(16), strict=True)]
    for got, want in zip(finish(session, requests, every=2), wanted, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs
        assert got.reason == "length"
        assert got.stats.num_tokens == len(want.tokens)


def plain_text_in_chunks(model: Decoder, prompt: tuple[int, ...], count: int, chunk: int) -> Result:
    session = Session(model, num_slots=1, capacity=64, chunk=chunk)
    return finish(session, [Request(prompt, count, NoDrafts(), logprobs=True)])[0]

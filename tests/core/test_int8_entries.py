"""Keys and values in eight bits: half the memory, the same bits on every way to write them, nearly the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.core.decoders import build, tokens
from tests.core.entries import all_entries
from tests.core.test_bits import prefill
from tests.core.test_packed import through_layers
from tests.every_method import make_model
from vivace.core.cache import quantise
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.kernels.native import NativeBody

PROMPTS = {0: tokens(9, 1), 2: tokens(70, 2), 1: tokens(130, 3)}


def eight_bits(variant: str, body: NativeBody | None = None) -> Decoder:
    decoder = build(variant, torch.bfloat16)
    if body is not None:
        pack_decoder(decoder, body)
    decoder.has_int8_entries = True
    return decoder


def test_the_largest_number_of_a_head_is_127() -> None:
    rows = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[1, 0] = 0
    codes, scale = quantise(rows)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(-1).flatten().tolist() == [127, 127, 0, *[127] * 7]
    assert not scale[1, 0]
    error = (codes.float() * scale.float() - rows.float()).abs().amax(-1, keepdim=True)
    assert (error <= 0.51 * scale.float() + 0.01 * rows.float().abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("variant", ["plain", "windows", "qk_norm", "experts", "dynamic"])
def test_native_code_writes_and_reads_the_bits_of_the_layers(variant: str, body: NativeBody) -> None:
    decoder = eight_bits(variant, body)
    caches, hidden = [], []
    for run in (decoder.run, lambda h, step: through_layers(decoder, h, step, 0, 3)):
        cache = decoder.new_cache(3, 256)
        for draft in (Draft.committed_only(PROMPTS), Draft.committed_only({1: [4, 5], 0: [3]})):
            step = Step.of(draft, cache)
            hidden.append(run(decoder.embed(draft.tokens, step), step))
            cache.commit(draft.slots, [range(count) for count in draft.committed])
        caches.append([part for layer in range(3) for part in all_entries(cache, layer)])
    assert torch.equal(hidden[0], hidden[2])
    assert torch.equal(hidden[1], hidden[3])
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("is_native", [False, True])
def test_numbers_are_nearly_those_of_whole_entries(is_native: bool, body: NativeBody) -> None:
    whole, eight = build("plain", torch.bfloat16), eight_bits("plain", body if is_native else None)
    if is_native:
        pack_decoder(whole, body)
    found = [model.head(prefill(model, PROMPTS, 3)[1]) for model in (whole, eight)]
    assert not torch.equal(*found)
    assert (found[0] - found[1]).abs().mean() < 0.02 * found[0].std()
    bytes_each = [model.slot_bytes(1024) / 1024 for model in (whole, eight)]
    assert bytes_each[1] / bytes_each[0] == (12 + 2) / 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_drafted_and_not_kept_leaves_no_trace(dtype: str, tmp_path: Path) -> None:
    engine = vivace.load(make_model(tmp_path, "multirate"), dtype=dtype, kv="int8")
    asked: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "raw": True, "do_sample": False}
    texts = [engine.generate(["aka bob aka", "the quick"], method=name, **asked) for name in ("plain", "multirate")]
    for plain, drafted in zip(*texts, strict=True):
        assert (plain.token_ids, plain.logprobs) == (drafted.token_ids, drafted.logprobs)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv is 'int9'; did you mean 'int8'"):
        vivace.load(make_model(tmp_path, "plain"), kv="int9")

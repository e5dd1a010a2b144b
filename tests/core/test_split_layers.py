"""Layers in two native calls, and halves of layers between whose products ranks add, have the bits of whole layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import vivace
from tests.parity.families import CONFIGS, make
from vivace.checkpoint.load import load_config, load_decoder
from vivace.core.cache import KVCache
from vivace.core.cpu.backend import backend_of
from vivace.core.cpu.split_layers import NativeSplitLayers, SummedSpan
from vivace.core.model import Decoder
from vivace.core.split_layers import SplitModules, split_layers
from vivace.core.step import Step
from vivace.core.summed import Point
from vivace.kernels.choice import choose
from vivace.parallel.shares import shares_of
from vivace.parallel.tensor import ShareParts, shard_of

DENSE = sorted(set(CONFIGS) - {"mixtral", "olmoe", "qwen3_moe"})
SLOTS, POSITIONS = [0] * 5 + [1] * 3, [*range(5), *range(3)]


def rows_in(decoder: Decoder) -> tuple[Step, Tensor, KVCache]:
    """Rows of two texts, as they enter the first layer."""
    cache = decoder.new_cache(2, 16)
    cache.extend([0, 1], [5, 3])
    step = Step.at(cache, SLOTS, POSITIONS)
    return step, decoder.embed(torch.arange(8) * 7 % decoder.config.vocab_size, step), cache


def entries(cache: KVCache, layer: int) -> list[Tensor]:
    return [part for slot, stop in ((0, 5), (1, 3)) for part in cache.span(layer, slot, 0, stop)]


@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "weights"), [("float32", "bf16"), ("bfloat16", "bf16"), ("bfloat16", "int8")])
@torch.inference_mode()
def test_two_calls_have_the_bits_of_one(name: str, dtype: str, weights: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    decoder = vivace.load(tmp_path, dtype=dtype, weights=weights).model
    step, h, whole = rows_in(decoder)
    expected = decoder.run(h, step)
    step, _, cache = rows_in(decoder)
    split = split_layers(decoder, step)
    fetches = (name, dtype) == ("qwen3_moe", "float32")  # experts of such numbers run one by one
    assert isinstance(split, SplitModules if fetches else NativeSplitLayers)
    modules = SplitModules(decoder)
    for index in range(decoder.config.num_layers):
        one_by_one = modules.finish(h, modules.project(h, step, index), step, index)
        projected = split.project(h, step, index)
        for ours, theirs in zip(entries(cache, index), entries(whole, index), strict=True):
            assert torch.equal(ours, theirs), "keys and values are there before the rest"
        h = split.finish(h, projected, step, index)
        assert torch.equal(h, one_by_one)
    assert torch.equal(h, expected)


def test_pytorch_goes_through_modules(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    decoder = vivace.load(tmp_path, kernels="torch").model
    step, _, _ = rows_in(decoder)
    assert isinstance(split_layers(decoder, step), SplitModules)


class Alone:
    """Implements ``Collective`` for one rank, which keeps what it was given."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the product, in memory of its own."""
        self.points.append(point)
        return x + 0


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.bfloat16, "q4")]
)
@torch.inference_mode()
def test_halves_have_the_bits_of_modules(name: str, dtype: torch.dtype, weights: str, tmp_path: Path) -> None:
    """Biases, norms behind a half and feed-forwards without a gate among them; norms over all heads forbid it."""
    make(name).save_pretrained(tmp_path)
    config, adding = load_config(tmp_path), Alone()
    share = shares_of(config, 2)[0]
    body = choose().body
    decoder = load_decoder(
        tmp_path,
        dtype,
        parts=ShareParts(config, share, adding, has_ends=True),
        backend=lambda kind: backend_of(body, weights, kind, is_required=True),  # type: ignore[arg-type]
        shard=shard_of(config, share, has_ends=True),
    )
    span = decoder.backend.span
    if config.qk_norm == "full":
        assert span is None
        return
    assert isinstance(span, SummedSpan)
    step, h, _ = rows_in(decoder)
    assert span.covers(step)
    expected = h
    for layer in decoder.layers:
        expected = layer(expected, step)
    asked, adding.points = adding.points, []
    step, _, _ = rows_in(decoder)
    assert torch.equal(decoder.run(h, step), expected)
    assert adding.points == asked == [(at, site) for at in range(config.num_layers) for site in ("o", "down")]

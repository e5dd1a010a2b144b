"""A decoder in twelve bits is the decoder: logits, text and entries of the cache are those of bfloat16 to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.decoders import VARIANTS, build, tokens
from tests.core.test_bits import (  # noqa: F401 - collected here with this file's decoder
    prefill,
    test_alone_and_among_sixteen,
    test_chains_of_any_length_are_single_rows,
    test_tree_nodes_are_chain_rows,
)
from tests.core.test_packed import (  # noqa: F401 - collected here with this file's decoder
    PROMPTS,
    drafts,
    test_spans_are_layers_one_by_one,
)
from vivace.core.cpu.backend import pack_decoder
from vivace.core.cpu.low_bit import LowBitLinear, LowBitRows
from vivace.core.cpu.packed import PackedLinear
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.native import NativeBody


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def packed(variant: str, body: NativeBody) -> Decoder:
    return packing(variant, body, "exact12")


@pytest.fixture
def decoder(packed: Decoder) -> Decoder:
    return packed


def packing(variant: str, body: NativeBody | None, weights: str) -> Decoder:
    made = build(variant, torch.bfloat16)
    pack_decoder(made, body, weights)
    return made


def test_it_is_the_model_to_the_bit(variant: str, packed: Decoder, body: NativeBody) -> None:
    """Prompts in chunks, single rows, chains and trees of up to 22 rows, dense batches, and choices of tokens."""
    stored = packing(variant, body, "bf16")
    caches = []
    for decoder in (stored, packed):
        cache, hidden = prefill(decoder, PROMPTS, 3)
        caches.append((decoder, cache, decoder.head(hidden)))
    assert torch.equal(caches[0][2], caches[1][2])
    for name in drafts(caches[0][1]):
        found = [answer(decoder, drafts(cache)[name]) for decoder, cache, _ in caches]
        assert all(map(torch.equal, *found)), name
    for layer in range(3):
        for slot, prompt in PROMPTS.items():
            entries = [cache.span(layer, slot, 0, len(prompt)) for _, cache, _ in caches]
            assert all(map(torch.equal, *entries))
    assert torch.equal(scores(stored), scores(packed))


def answer(decoder: Decoder, step: Step) -> tuple[Tensor, Tensor]:
    rows = decoder.run(decoder.embed(torch.tensor(tokens(step.num_rows, 8)), step), step)
    return decoder.head(rows), decoder.greedy(rows)


def scores(decoder: Decoder) -> Tensor:
    step, rows = Step.dense(2, 20), torch.tensor(tokens(40, 3))
    return decoder.head(decoder.run(decoder.embed(rows, step), step))


def test_without_native_kernels(variant: str) -> None:
    assert torch.equal(scores(packing(variant, None, "exact12")), scores(build(variant, torch.bfloat16)))


def test_every_matrix_is_packed_and_a_tied_one_once(packed: Decoder) -> None:
    assert isinstance(packed.embedding_rows, LowBitRows)
    assert packed.embedding.numel() == 0
    assert not any(isinstance(module, Linear) for module in packed.modules())
    kept = [module for module in packed.layers.modules() if isinstance(module, LowBitLinear)]
    assert kept
    assert {module.weight.format for module in kept} == {"exact12"}
    routers = [module for name, module in packed.named_modules() if isinstance(module, PackedLinear)]
    assert bool(routers) == (packed.config.moe is not None), "routers stay as they are"
    assert packed.embedding_rows.weight.format == "exact12_rows"
    assert (packed.lm_head.codes.data_ptr() == packed.embedding_rows.codes.data_ptr()) == packed.config.tied_head


def test_other_dtypes_are_refused(body: NativeBody) -> None:
    for kernels in (body, None):
        with pytest.raises(UnsupportedError, match=r"this model's are float32; give --dtype bfloat16"):
            pack_decoder(build("plain"), kernels, "exact12")

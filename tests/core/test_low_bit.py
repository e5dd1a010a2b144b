"""A decoder in few bits: rows keep their bits, spans are layers, it is near the model, and nothing is kept twice."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.core.decoders import build, tokens
from tests.core.test_bits import (  # noqa: F401 - collected here with this file's decoder
    prefill,
    test_alone_and_among_sixteen,
    test_chains_of_any_length_are_single_rows,
    test_tree_nodes_are_chain_rows,
)
from tests.core.test_packed import test_spans_are_layers_one_by_one  # noqa: F401 - collected here, as above
from vivace.core.cpu.backend import pack_decoder
from vivace.core.cpu.low_bit import LowBitLinear, LowBitRows
from vivace.core.cpu.packed import PackedLinear
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.core.moe import MixtureOfExperts
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.native import NativeBody

VARIANTS = ("experts", "learned", "plain", "post_norm", "qk_norm")
FORMATS = ("int8", "q4", "lut4", "lut3", "lut2")
pytestmark = pytest.mark.slow_where(
    lambda variant="plain", weights="int8", **_: variant not in ("experts", "plain") and weights not in ("int8", "lut3")
)
"""The other variants differ outside the products, so that a format of each kind is enough for them."""


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FORMATS)
def weights(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def packed(variant: str, weights: str, body: NativeBody) -> Decoder:
    made = build(variant, torch.bfloat16)
    pack_decoder(made, body, weights)
    return made


@pytest.fixture
def decoder(packed: Decoder) -> Decoder:
    return packed


def logits(decoder: Decoder) -> Tensor:
    step, rows = Step.dense(2, 20), torch.tensor(tokens(40, 3))
    return decoder.head(decoder.run(decoder.embed(rows, step), step)).float()


def meant(variant: str, weights: str) -> Decoder:
    """The variant with each weight replaced by what is left of it."""
    rounded, dense = build(variant, torch.bfloat16), build(variant, torch.float32)
    pack_decoder(rounded, None, weights)
    parts = dict(rounded.named_modules())
    for name, module in dense.named_modules():
        if isinstance(parts.get(name), LowBitLinear):
            module.weight.data = parts[name].weight.dense()
    assert rounded.embedding_rows is not None
    dense.embedding.data = rounded.embedding_rows.weight.dense()
    if dense.lm_head is not None:
        dense.lm_head.weight.data = rounded.lm_head.weight.dense()
    return dense


@cache
def logits_without_kernels(variant: str, weights: str) -> tuple[Tensor, Tensor]:
    """Those of the weights that are left, in float32, and those that PyTorch computes in few bits."""
    in_torch = build(variant, torch.bfloat16)
    pack_decoder(in_torch, None, weights)
    return logits(meant(variant, weights)), logits(in_torch)


def test_it_is_the_model_of_its_weights(variant: str, weights: str, packed: Decoder) -> None:
    """What is left of the difference is the rounding of activations to eight bits and of results to bfloat16."""
    exact, in_torch = logits_without_kernels(variant, weights)
    spread = exact.std()
    founds = [in_torch]
    shares_tiles = variant == "experts" and weights.startswith("lut")  # of 20 gates and 20 ups that are one matrix
    if not shares_tiles:
        founds.append(logits(packed))
    for found in founds:
        assert (found - exact).abs().mean() < 0.06 * spread


def test_only_rounded_matrices_stay(variant: str, weights: str, packed: Decoder) -> None:
    assert isinstance(packed.embedding_rows, LowBitRows)
    assert packed.embedding.numel() == 0
    assert packed.embedding_rows.weight.format == "int8"
    assert packed.lm_head.weight.format == "int8"
    if packed.config.tied_head:
        assert packed.lm_head.codes.data_ptr() == packed.embedding_rows.codes.data_ptr()
    for module in packed.layers.modules():
        assert not isinstance(module, Linear)
        if isinstance(module, LowBitLinear):
            assert module.weight.format == weights
        if isinstance(module, MixtureOfExperts):
            assert isinstance(module.router, PackedLinear), "routers keep their digits"


@pytest.mark.parametrize("variant", ["experts", "plain"])
def test_torch_rows_keep_their_bits(variant: str, weights: str) -> None:
    """What the others differ in has no weights in few bits; all palettes go the way of those of three bits."""
    if variant == "experts" and weights in ("lut2", "lut4"):
        pytest.skip("experts of three bits are tested")
    decoder = build(variant, torch.bfloat16)
    pack_decoder(decoder, None, weights)
    assert decoder.backend.span is None
    assert not any(isinstance(module, nn.Linear | PackedLinear) for module in decoder.modules())
    test_chains_of_any_length_are_single_rows(decoder)
    test_tree_nodes_are_chain_rows(decoder)


def test_refusals(body: NativeBody) -> None:
    with pytest.raises(UnsupportedError, match="bfloat16 weights, this model's are float32"):
        pack_decoder(build("plain"), body, "q4")
    pack_decoder(build("plain"), None, "q4")  # PyTorch computes in either


def test_no_gradients(packed: Decoder) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(4, 48, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(UnsupportedError, match="cannot be trained"):
            packed.lm_head(x)

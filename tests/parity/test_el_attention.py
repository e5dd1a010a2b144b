"""EL-attention against keys and values: the same numbers in all families, from one state a token of the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import vivace
from tests.parity.encoder_decoders import ENCODER_DECODERS, make_encoder_decoder
from tests.parity.test_encoder_decoders import LENGTHS, TEXT, stepped, tokens
from vivace.checkpoint.load import load_decoder
from vivace.core.backend import Backend
from vivace.core.config import ModelConfig
from vivace.core.cpu.backend import backend_of
from vivace.core.cpu.packed import NativeAttention
from vivace.core.cross import Sources
from vivace.core.el_attention import ElAttention
from vivace.core.layers import Linear
from vivace.core.model import Decoder, Layer
from vivace.core.parts import DenseParts
from vivace.core.step import Step
from vivace.kernels.choice import choose

SEARCHES: list[dict[str, Any]] = [
    {"max_new_tokens": 12, "num_beams": 1},
    {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
]


@pytest.fixture(scope="module", params=sorted(ENCODER_DECODERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path: Path = tmp_path_factory.mktemp(request.param)
    theirs: Any = make_encoder_decoder(request.param)
    theirs.save_pretrained(path)
    with torch.inference_mode():
        yield path


def both(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Decoder, Decoder]:
    """The model with keys and values of sources, and with states."""
    shared, el = (
        load_decoder(folder, dtype, reads_sources=True, sources=sources, **how) for sources in ("shared", "el")
    )
    return shared, el


def reading(model: Decoder, states: list[Tensor], slots: list[int]) -> Step:
    """The call of one row for each of ``slots``, whose sources have these states."""
    cache = model.new_cache(len(states), 64)
    model.read_sources(dict(enumerate(states)), cache)
    return Step.at(cache, slots, list(range(len(slots))))


def crosses(model: Decoder) -> list[Any]:
    return [layer.cross for layer in model.layers if isinstance(layer, Layer)]


def states_of(width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    return [torch.randn(length, width, generator=make, dtype=torch.float64).to(dtype) for length in LENGTHS]


def test_every_layer_reads_the_same_in_float64(folder: Path) -> None:
    """Ragged sources, several rows of each, as beams are: within 1e-12, by whatever biases, widths and scale."""
    shared, el = both(folder, torch.float64)
    states, slots = states_of(shared.config.width), [0, 0, 0, 1, 2, 2, 1]
    steps = [reading(model, states, slots) for model in (shared, el)]
    h = torch.randn(len(slots), shared.config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(crosses(shared), crosses(el), strict=True):
        expected, found = one(h, steps[0]), other(h, steps[1])
        assert (found - expected).abs().max() < 1e-12
        assert (expected - h).abs().max() > 0.1, "something is read"


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_query_heads_that_share_keys(num_kv_heads: int) -> None:
    """No family has them beside an encoder; nor an encoder of another width."""
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "num_heads": 4,
        "head_dim": 6,
        "ffn_width": 8,
        "max_positions": 64,
        "num_layers": 2,
    }
    encoder = ModelConfig(**sizes, width=10, num_kv_heads=4, positions="learned", is_causal=False)
    config = ModelConfig(
        **sizes, width=16, num_kv_heads=num_kv_heads, positions="learned", qkv_bias=True, encoder=encoder
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        shared, el = (Decoder(config, DenseParts(config, kind)).double() for kind in get_args(Sources))
        for parameter in shared.parameters():
            parameter.normal_()
        el.load_state_dict(shared.state_dict())
        slots = [2, 0, 1, 1]
        steps = [reading(model, states_of(encoder.width), slots) for model in (shared, el)]
        h = torch.randn(len(slots), config.width, dtype=torch.float64)
        for one, other in zip(crosses(shared), crosses(el), strict=True):
            expected = one(h, steps[0])
            assert (other(h, steps[1]) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_a_bias_of_keys_cancels(folder: Path) -> None:
    """It moves all scores of a row alike: el leaves it out, and attention over keys gives the same with another one."""
    shared, el = both(folder, torch.float64)
    if crosses(shared)[0].kv.bias is None:
        assert not shared.config.qkv_bias
        return
    states, slots = states_of(shared.config.width), [0, 1, 2, 2]
    steps = [reading(model, states, slots) for model in (shared, el)]
    h = torch.randn(len(slots), shared.config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    before = crosses(el)[1](h, steps[1])
    half = shared.config.num_kv_heads * shared.config.head_dim
    for model in (shared, el):
        crosses(model)[1].kv.bias[:half] += torch.linspace(-3, 3, half, dtype=torch.float64)
    assert torch.equal(crosses(el)[1](h, steps[1]), before)
    moved = reading(shared, states, slots)
    assert (crosses(shared)[1](h, moved) - before).abs().max() < 1e-12


def test_logits_in_float32_alone_and_in_a_ragged_batch(folder: Path) -> None:
    shared, el = both(folder)
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = [tokens(TEXT, seed + 10) for seed in range(len(LENGTHS))]
    expected, found = stepped(shared, sources, texts), stepped(el, sources, texts)
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (other - one).abs().max() < 1e-5 * max(1.0, float(one.abs().max()))
        assert torch.equal(stepped(el, sources[place : place + 1], texts[place : place + 1])[0], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_kernels(folder: Path, dtype: torch.dtype) -> None:
    """Attention to states is native too, and a text has the same bits alone and among others."""

    def native(_: torch.dtype) -> Backend | None:
        return backend_of(choose("auto", device=torch.device("cpu")).body, "bf16", dtype, is_required=False)

    if native(dtype) is None:
        pytest.skip("no native kernels here")
    shared, el = both(folder, dtype, backend=native)
    assert all(isinstance(cross.attention, NativeAttention) for cross in crosses(el))
    assert not any(isinstance(part, Linear) for cross in crosses(el) for part in cross.modules())
    assert el.backend.span is None
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = [tokens(TEXT, seed + 10) for seed in range(len(LENGTHS))]
    found = stepped(el, sources, texts)
    for place, (one, other) in enumerate(zip(stepped(shared, sources, texts), found, strict=True)):
        assert torch.equal(stepped(el, sources[place : place + 1], texts[place : place + 1])[0], other)
        if dtype == torch.float32:
            assert (other - one).abs().max() < 1e-5 * max(1.0, float(one.abs().max()))
    if dtype == torch.bfloat16:  # rounding is another: attention itself is within the notes' bound
        states, slots = states_of(shared.config.width, dtype), [0, 0, 1, 2]
        h = torch.randn(len(slots), shared.config.width, generator=torch.Generator().manual_seed(1)).to(dtype)
        for one, other in zip(crosses(shared), crosses(el), strict=True):
            expected = one(h, reading(shared, states, slots)).float()
            assert (other(h, reading(el, states, slots)).float() - expected).abs().max() < 2e-2 * expected.abs().max()


def test_a_source_takes_one_state_a_token(folder: Path) -> None:
    """B x S x E numbers, whatever the number of layers and beams; keys and values are 2 L K D for E."""
    shared, el = both(folder)
    c, length, count = shared.config, 128, 3
    assert el.keeps_states
    states = [torch.randn(length, c.width) for _ in range(count)]
    caches = [model.new_cache(count, 64) for model in (shared, el)]
    for model, cache in zip((shared, el), caches, strict=True):
        model.read_sources(dict(enumerate(states)), cache)
    kept, lean = (cache.beside for cache in caches)
    assert kept is not None
    assert lean is not None
    before = lean.nbytes
    Step.at(caches[1], [0, 0, 0, 0, 2], [0, 1, 2, 3, 0])  # rows, such as beams, take nothing beside the source
    assert before == lean.nbytes == count * length * c.width * 4 == count * el.source_bytes(length)
    assert kept.store.block_bytes == kept.store.size * 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    assert lean.lengths == [length] * count
    stored = lean.entries(0, 1, length)
    assert torch.equal(stored[0][0], states[1])
    assert stored[0].data_ptr() == stored[1].data_ptr(), "keys and values are one"
    lean.release([0, 1, 2])
    assert lean.nbytes == 0


def test_order_of_beams_changes_nothing(folder: Path) -> None:
    """Rows in another order give the same bits in that order: nothing is reordered in the cache."""
    _, el = both(folder)
    states, slots, order = states_of(el.config.width, torch.float32), [0, 0, 0, 1, 1], [2, 4, 0, 3, 1]
    h = torch.randn(len(slots), el.config.width, generator=torch.Generator().manual_seed(5))
    usual = reading(el, states, slots)
    other = reading(el, states, [slots[place] for place in order])
    for cross in crosses(el):
        assert torch.equal(cross(h[order], other), cross(h, usual)[order])


def test_weights_are_cut_and_not_changed(folder: Path) -> None:
    shared, el = both(folder)
    kept = dict(shared.named_parameters())
    assert {name: parameter.shape for name, parameter in el.named_parameters()} == {
        name: parameter.shape for name, parameter in kept.items()
    }
    stepped(el, [tokens(9, 0)], [tokens(3, 1)])
    assert all(torch.equal(parameter, kept[name]) for name, parameter in el.named_parameters())
    assert all(isinstance(cross, ElAttention) for cross in crosses(el))


@pytest.mark.slow_where(
    lambda folder, kernels, asked: folder != "t5" and (kernels == "torch") == (asked["num_beams"] > 1)
)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("asked", SEARCHES, ids=["greedy", "beams"])
def test_ids_of_greedy_and_beam_texts(folder: Path, kernels: str, asked: dict[str, Any]) -> None:
    shared, el = (vivace.load(folder, kernels=kernels, attention=attention) for attention in ("shared", "el"))
    assert el.sources.name == "el"
    assert el.model.keeps_states
    sources = [tokens(length, seed + 30) for seed, length in enumerate((*LENGTHS, 5))]
    results = el.generate(sources, ignore_eos=True, **asked)
    for source, one, other in zip(sources, shared.generate(sources, ignore_eos=True, **asked), results, strict=True):
        assert other.token_ids == one.token_ids
        assert [text.token_ids for text in other.alternatives] == [text.token_ids for text in one.alternatives]
        assert len(one.token_ids) == 12
        alone = el.generate([source], ignore_eos=True, **asked)[0]
        assert (alone.token_ids, alone.score) == (other.token_ids, other.score), "the same alone, to the bit"
        if one.score is not None:
            assert other.score == pytest.approx(one.score, rel=1e-5, abs=1e-5)

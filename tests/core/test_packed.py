"""A packed decoder is the same model: near float64, spans as layers, adapters, one copy, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.decoders import BASE, VARIANTS, VOCAB, build, tokens
from tests.core.entries import all_entries, set_entries
from tests.core.test_bits import prefill, tree
from tests.decode.tiny_decoders import randomise
from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig, MoeConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.cpu.span import NativeSpan
from vivace.core.layers import Linear
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.native import NativeBody

PROMPTS = {2: tokens(70, 1), 0: tokens(9, 2), 1: tokens(130, 3)}


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def packed(variant: str, body: NativeBody) -> Decoder:
    return packing(build(variant, torch.bfloat16), body)


def packing(decoder: Decoder, body: NativeBody) -> Decoder:
    pack_decoder(decoder, body)
    return decoder


def logits_of(decoder: Decoder, text: list[int]) -> Tensor:
    """Half a prompt in one chunk, the rest one token at a time."""
    half = len(text) // 2
    cache, hidden = prefill(decoder, {0: text[:half]}, 1)
    rows = [hidden]
    for token in text[half:]:
        step = Step.of(Draft.committed_only({0: [token]}), cache)
        rows.append(decoder.run(decoder.embed(torch.tensor([token]), step), step))
        cache.commit([0], [[0]])
    return decoder.head(torch.cat(rows)).double()


def test_as_near_to_the_model_as_torch_is(variant: str, packed: Decoder) -> None:
    """Against the same weights in float64 neither is much further off than the other."""
    text = tokens(100, 7)
    torch_logits = logits_of(build(variant, torch.bfloat16), text)
    exact_model = build(variant, torch.float32)
    for parameter in exact_model.parameters():
        parameter.data = parameter.bfloat16().double()
    exact_cache, exact_hidden = prefill(exact_model, {0: text}, 1)
    assert exact_cache.lengths == [len(text)]
    exact = exact_model.head(exact_hidden).double()
    ours, theirs = ((found - exact).abs().mean() for found in (logits_of(packed, text), torch_logits))
    assert ours <= 1.25 * theirs + 1e-6
    assert theirs <= 1.25 * ours + 1e-6


def drafts(cache: KVCache) -> dict[str, Step]:
    """Calls of every shape over the stored prompts."""
    one = Draft.committed_only({1: [5]})
    chains = Draft.committed_only({1: tokens(4, 5), 0: [3], 2: tokens(17, 6)})
    wide = tree({1: [4], 2: [9, 8]}, (3, 2), seed=4)
    row = Step.of(chains, cache)
    return {
        "one row": Step.of(one, cache),
        "chains": row,
        "trees": Step.of(wide, cache),
        "some rows": row.take(torch.tensor([0, 1, 5, 6, 21])),
        "readers": row.readers(torch.tensor([3, 21]), fed=False),
    }


class Watched:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def __call__(self, layer: int, rows: Tensor) -> None:
        self.layers.append(layer)
        self.rows = rows


def through_layers(decoder: Decoder, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
    for index in range(start, stop):
        h = decoder.layers[index](h, step)
    return h


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_likeliest_token_is_that_of_scaled_logits(body: NativeBody, dtype: torch.dtype) -> None:
    """A scale that is no power of two rounds what the head reads, and with it which of two near logits is larger."""
    decoder = Decoder(ModelConfig(**BASE | {"head_scale": 48**-0.5, "vocab_size": 4096}))
    randomise(decoder, 0)
    own = body.of(dtype)
    assert own is not None
    packing(decoder.to(dtype).requires_grad_(False).eval(), own)
    h = torch.randn(2000, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(decoder.greedy(h), decoder.head(h).argmax(-1))


def test_spans_are_layers_one_by_one(variant: str, packed: Decoder) -> None:
    assert isinstance(packed.backend.span, NativeSpan)
    cache, _ = prefill(packed, PROMPTS, 3)
    for name, step in drafts(cache).items():
        h = torch.randn(step.num_rows, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
        before = [all_entries(cache, layer) for layer in range(3)]
        expected = through_layers(packed, h, step, 0, 3)
        written = [all_entries(cache, layer) for layer in range(3)]
        set_entries(cache, before)
        assert torch.equal(packed.run(h, step), expected), name
        for layer in range(3):
            assert all(map(torch.equal, all_entries(cache, layer), written[layer])), name
        watched = Watched()
        assert torch.equal(packed.run(h, step, watch=watched), expected), name
        assert watched.layers == [0, 1, 2]
        assert torch.equal(watched.rows, expected)
        assert torch.equal(packed.run(packed.run(h, step, 0, 2), step, 2), expected), name
        logits = packed.head(expected)
        assert torch.equal(packed.greedy(expected), logits.argmax(-1)), name


@pytest.mark.parametrize("moe", [None, MoeConfig(7, 3, 96, True)], ids=["dense", "experts"])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_spans_with_any_number_of_threads(body: NativeBody, threads: int, moe: MoeConfig | None) -> None:
    """A phase begins when the one before is complete, also where a thread comes late."""
    packed = packing(wide_decoder(moe=moe), body)
    cache, _ = prefill(packed, {0: tokens(40, 1)}, 1)
    step = Step.of(Draft.committed_only({0: tokens(6, 2)}), cache)
    h = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = packed.run(h, step)
    torch.set_num_threads(threads)
    for _ in range(60):
        assert torch.equal(packed.run(h, step), alone)


def wide_decoder(**fields: object) -> Decoder:
    changes = {"width": 256, "ffn_width": 512, "num_heads": 8, "head_dim": 32, "num_layers": 4}
    decoder = Decoder(ModelConfig(**BASE | changes | fields))
    randomise(decoder, 0)
    return decoder.to(torch.bfloat16).requires_grad_(False).eval()


SITES = ("q", "k", "v", "o", "gate", "up", "down", "mlp")


def adapters(
    which: Tensor,
    sites: tuple[str, ...],
    *,
    rank: int = 5,
    scale: float = 0.2,
    seed: int = 0,
    fields: dict[str, Any] = BASE,
) -> LowRankDeltas:
    generator = torch.Generator().manual_seed(seed)
    e, f = fields["width"], fields["ffn_width"]
    heads, keys = fields["num_heads"] * fields["head_dim"], fields["num_kv_heads"] * fields["head_dim"]
    widths = {"q": (e, heads), "k": (e, keys), "v": (e, keys), "o": (heads, e), "gate": (e, f), "up": (e, f)}
    widths |= {"down": (f, e), "mlp": (e, e)}

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    pairs = [(layer, site) for layer in (0, 2) for site in sites]
    return LowRankDeltas(
        which,
        {(layer, site): normal(2, rank, widths[site][0]) for layer, site in pairs},
        {(layer, site): normal(2, widths[site][1], rank) for layer, site in pairs},
    )


@pytest.mark.parametrize("sites", [SITES, *((site,) for site in SITES)], ids="-".join)
def test_terms_of_some_rows(body: NativeBody, sites: tuple[str, ...]) -> None:
    """Rows with terms come out as PyTorch adds them; the others do not notice, to the bit."""
    rows_with_terms(body, "qk_norm", sites)


@pytest.mark.parametrize("variant", ["local and global", "post_norm", "learned"])
def test_terms_beside_every_kind_of_norm(body: NativeBody, variant: str) -> None:
    """At all sites at once; a feed-forward without a gate has none there."""
    rows_with_terms(body, variant, tuple(site for site in SITES if variant != "learned" or site != "gate"))


def test_terms_beside_experts(body: NativeBody) -> None:
    """Those of the whole feed-forward are added to what the experts give."""
    rows_with_terms(body, "experts", ("q", "k", "v", "o", "mlp"))


def rows_with_terms(body: NativeBody, variant: str, sites: tuple[str, ...]) -> None:
    packed, dense = packing(build(variant, torch.bfloat16), body), build(variant, torch.bfloat16)
    cache, _ = prefill(packed, PROMPTS, 3)
    step = Step.of(Draft.committed_only({1: tokens(2, 5), 0: [3, 4], 2: [1]}), cache)
    h = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = packed.run(h, step)
    without = [tuple(t.clone() for t in cache.span(layer, 0, 9, 11)) for layer in range(3)]
    which, other = torch.tensor([0, 1, -1, -1, 1]), torch.tensor([1, -1, -1, -1, 0])
    scale = 0.2 if len(sites) > 1 or sites[0] not in "kv" else 2.0  # one changed entry among a hundred
    fields = BASE | VARIANTS[variant]
    terms = tuple(adapters(w, sites, scale=scale, seed=i, fields=fields) for i, w in enumerate((which, other)))
    with_terms = replace(step, deltas=terms)
    got = packed.run(h, with_terms)
    assert torch.equal(got[2:4], plain[2:4])
    for layer in range(3):
        assert all(map(torch.equal, cache.span(layer, 0, 9, 11), without[layer]))
    assert not torch.equal(got[0], plain[0])
    difference = (got - through_layers(packed, h, with_terms, 0, 3)).float().abs().mean()
    assert difference < 0.01, "as the layers one by one, up to the order in which PyTorch sums the terms"
    rows = which >= 0
    reference = through_layers(dense, h, with_terms, 0, 3)[rows].float()
    error, effect = ((found[rows] - reference).abs().mean() for found in (got.float(), plain.float()))
    assert error < effect / 3


def test_terms_that_change_are_packed_again(body: NativeBody) -> None:
    packed = packing(build("plain", torch.bfloat16), body)
    with torch.inference_mode(False):
        deltas = adapters(torch.tensor([0]), ("o",))
        cache, _ = prefill(packed, {0: [1, 2, 3]}, 1)
        step = replace(Step.of(Draft.committed_only({0: [5]}), cache), deltas=(deltas,))
        h = packed.embed(torch.tensor([5]), step)
        before = packed.run(h, step)
        for up in deltas.up.values():
            up.mul_(3)
        assert not torch.equal(packed.run(h, replace(step)), before), "in the next call"


def test_readers_of_zero_terms_are_the_rows_they_read_behind(body: NativeBody) -> None:
    packed = packing(build("plain", torch.bfloat16), body)
    cache, _ = prefill(packed, PROMPTS, 3)
    step = Step.of(Draft.committed_only({1: tokens(3, 5), 0: [3]}), cache)
    which = torch.tensor([-1, -1, -1, -1, 0, 1])
    both = step.readers(torch.tensor([1, 3]), adapters(which, ("q", "o", "mlp"), scale=0.0))
    h = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = packed.run(torch.cat((h, h[[1, 3]])), both)
    assert torch.equal(out[:4], packed.run(h, step))
    assert torch.equal(out[4:], out[[1, 3]])


def test_one_copy(body: NativeBody) -> None:
    """No dense projection stays, and packing only adds what fills the last tile of each."""
    decoder = build("plain", torch.bfloat16)
    dense = sum(p.nbytes for p in decoder.parameters())
    pack_decoder(decoder, body)
    assert not [module for module in decoder.modules() if isinstance(module, Linear)]
    assert sum(p.nbytes for p in decoder.parameters()) == dense
    assert decoder.lm_head is not None
    assert decoder.lm_head.weight.data_ptr() == decoder.embedding.data_ptr()


def test_refusals(body: NativeBody) -> None:
    with pytest.raises(UnsupportedError, match=r"bfloat16 weights, this model's are float32"):
        pack_decoder(build("plain"), body, "int8")
    with pytest.raises(UnsupportedError, match=r"bfloat16 and float32 weights, this model's are float16"):
        pack_decoder(build("plain", torch.float16), body)
    packed = packing(build("plain", torch.bfloat16), body)
    with torch.inference_mode(False), torch.enable_grad():
        step = Step.dense(1, 4)
        h = torch.zeros(4, 48, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(UnsupportedError, match="cannot be trained"):
            packed.run(h, step)


def test_scoring_runs_on_packed_weights(variant: str, packed: Decoder) -> None:
    step = Step.dense(2, 6)
    rows = torch.tensor(tokens(12, 3))
    logits = packed.head(packed.run(packed.embed(rows, step), step))
    dense = build(variant, torch.bfloat16)
    step = Step.dense(2, 6)
    assert (logits - dense.head(dense.run(dense.embed(rows, step), step))).abs().mean() < 0.05
    assert logits.shape == (12, VOCAB)

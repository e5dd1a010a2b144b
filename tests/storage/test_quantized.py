"""Stores in int8 and q4: what lies there is what ``quantise`` makes, the budget changes no bit, and damage is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vivace
from tests.storage.stored import TOKENS, answers, opened, same
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.core.cpu.low_bit import LowBitLinear
from vivace.core.cpu.packed import PackedFeedForward
from vivace.core.footprint import held_bytes
from vivace.core.model import Decoder
from vivace.errors import ConfigError, CorruptError, UnsupportedError
from vivace.kernels.choice import choose
from vivace.kernels.layouts import LAYOUTS, layout_of, num_tiles, some_tiles
from vivace.kernels.low_bit import LowBit, quantise, size_of
from vivace.kernels.native import NativeBody
from vivace.prompts import packaged_prompts
from vivace.storage.convert import write_store
from vivace.storage.store import Store, verify

KINDS = ("int8", "q4")


@pytest.fixture(scope="module")
def body() -> NativeBody:
    found = choose("auto").body
    if found is None:
        pytest.skip("no native kernels run here")
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model."""
    return make_checkpoint(tmp_path_factory.mktemp("quantized") / "dense", layers=4)


@pytest.fixture(scope="module", params=["dense", "mixture"])
def folder(request: pytest.FixtureRequest, dense: Path) -> Path:
    """The dense model, and a mixture made from it."""
    if request.param == "mixture" and not (dense.parent / "mixture").exists():
        upcycle_checkpoint(dense, dense.parent / "mixture", num_experts=4, noise=0.5)
    return dense.parent / request.param


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 2), (48, 64), (96, 130), (32, 200)])
def test_a_matrix_lies_as_it_is_made(kind: str, shape: tuple[int, int]) -> None:
    """Round trip through bytes, in every format of the table; a part of it is that part of its rows."""
    weight, layout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16(), layout_of(kind)
    raw = b"".join(map(bytes, layout.bytes_of(weight)))
    assert len(raw) == layout.num_bytes(*shape)
    assert size_of(*shape, kind) <= len(raw) < size_of(*shape, kind) + 128  # type: ignore[arg-type]
    found = layout.view(torch.frombuffer(bytearray(raw), dtype=torch.uint8), *shape)
    last = some_tiles(found, slice(num_tiles(found) - 1, None))
    if isinstance(found, LowBit):
        made = quantise(weight, kind)  # type: ignore[arg-type]
        assert torch.equal(found.dense(), made.dense())
        assert isinstance(last, LowBit)
        assert torch.equal(last.dense(), made.dense()[-16:])
    else:
        assert torch.equal(found, layout.lay(weight)[0])
        assert torch.equal(last, found[-1:])


def stored(folder: Path, out: Path, kind: str, body: NativeBody) -> Store:
    return write_store(folder, out / kind, dtype="bfloat16", kernels=body.name, weights=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_changes_no_bit(folder: Path, tmp_path: Path, body: NativeBody, kind: str) -> None:
    """All in memory, and read while they are used."""
    store = stored(folder, tmp_path, kind, body)
    verify(store)
    assert store.weights == kind
    with opened(store, body=body) as (model, storage):
        expected = answers(model)
        assert storage.report
    for share in (0.97, 0.93):
        with opened(store, share, body=body) as (model, storage):
            assert storage.plan.streamed
            assert same(answers(model), expected)


def test_what_is_held_beside_experts_is_within_the_plan(dense: Path, tmp_path: Path, body: NativeBody) -> None:
    """Attention is bfloat16 in memory, whatever it is in the store; beyond that a bfloat16 store exceeds as much."""
    mixture = upcycle_checkpoint(dense, tmp_path / "mixture", num_experts=8, noise=0.5)
    excess = {}
    for kind in ("bf16", *KINDS):
        with opened(stored(mixture, tmp_path, kind, body), 0.8, body=body) as (model, storage):
            assert storage.experts is not None
            excess[kind] = held_bytes(model)[0] - storage.plan.resident_bytes - storage.plan.pool_bytes
    assert max(excess.values()) < excess["bf16"] + 1024, excess  # a matrix of attention has more


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_quantized_matrices(dense: Path, tmp_path: Path, body: NativeBody, kind: str) -> None:
    """To the bit those of a decoder in memory whose matrices are quantized one by one."""
    store = stored(dense, tmp_path, kind, body)
    with opened(store, 0.95, body=body) as (model, storage):
        assert storage.plan.streamed
        found = answers(model)
        oracle = quantized(load_decoder(dense, dtype="bfloat16"), model, body, kind)
        assert same(answers(oracle), found)


@pytest.mark.parametrize(("kind", "share", "most"), [("int8", 0.51, 0.02), ("q4", 0.27, 0.06)])
def test_the_shipped_model_in_fewer_bytes(
    tmp_path: Path, body: NativeBody, kind: str, share: float, most: float
) -> None:
    """A half and a quarter of the bytes are read, and answers lose little of their likelihood."""
    shipped = Path(vivace.__file__).parent / "weights" / "vivace-14m"
    store, whole = (write_store(shipped, tmp_path / each, weights=each, kernels=body.name) for each in (kind, "bf16"))
    assert store["layers.0.attention"].num_bytes < share * whole["layers.0.attention"].num_bytes
    tokenizer = load_tokenizer(shipped)
    asked = tuple(tuple(tokenizer.encode_prompt(row.request)) for row in packaged_prompts("e2e")[:8])
    asked = tuple(prompt for prompt in asked if len(prompt) <= TOKENS - 8)
    with opened(store, body=body) as (model, _):
        found = answers(model, asked)
    with opened(whole, body=body) as (model, _):
        plain = answers(model, asked)
    gaps = [
        abs(quantized_one - stored_one)
        for r, s in zip(found, plain, strict=True)
        for token, other, quantized_one, stored_one in zip(r.tokens, s.tokens, r.logprobs, s.logprobs, strict=False)
        if token == other
    ]
    assert len(gaps) > 24
    assert 0 < sum(gaps) / len(gaps) < most


def quantized(plain: Decoder, like: Decoder, body: NativeBody, kind: str) -> Decoder:
    """``like``, with every matrix of its layers quantized from those of ``plain`` and in memory."""

    def linear(weight: torch.Tensor) -> LowBitLinear:
        return LowBitLinear(quantise(weight.detach(), kind), None, body)  # type: ignore[arg-type]

    for theirs, mine in zip(plain.layers, like.layers, strict=True):
        mine.qkv, mine.o = linear(theirs.qkv.weight), linear(theirs.o.weight)  # type: ignore[union-attr]
        feed = theirs.feed_forward
        gate, up = feed.up.weight.chunk(2)  # type: ignore[union-attr]
        parts = (linear(gate), linear(up), linear(feed.down.weight))  # type: ignore[union-attr]
        mine.feed_forward = PackedFeedForward(body, plain.config.activation, 0, *parts)
    return like


def test_damage_to_what_is_streamed_is_seen(folder: Path, tmp_path: Path, body: NativeBody) -> None:
    store = stored(folder, tmp_path, "q4", body)
    bundle = next(b for name, b in store.bundles.items() if name.endswith((".feed_forward", ".experts.0")))
    with store.path.open("r+b") as file:
        file.seek(bundle.offset + 40)
        byte = file.read(1)
        file.seek(bundle.offset + 40)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptError, match="checksum"):
        verify(store)
    with pytest.raises(CorruptError), opened(store, 0.93, body=body) as (model, _):
        answers(model)


def test_what_cannot_be_quantized_is_refused(folder: Path, tmp_path: Path, body: NativeBody) -> None:
    for bad, message in (
        ({"weights": "int9"}, "did you mean"),
        ({"weights": "q4", "dtype": "float32"}, "in float32"),
        ({"weights": "int8", "kernels": "torch"}, "native kernels"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=message):
            write_store(folder, tmp_path / "never", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()

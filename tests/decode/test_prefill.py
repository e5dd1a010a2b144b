"""Prefill goes in chunks, never computes logits of a prompt, and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.decode.runs import finish
from tests.decode.tiny_decoders import VOCAB, build
from vivace.core.cache import KVCache
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.decode.forward import ForwardPass
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody

PROMPT = 8192
WIDE = 128_000
MIB = 2**20


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        owned = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in owned:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


@pytest.fixture
def rows_of_head(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the language model head."""
    rows: list[int] = []
    head = Decoder.head

    def counting(self: Decoder, h: Tensor, *, row_count: int = 1) -> Tensor:
        rows.append(len(h))
        return head(self, h, row_count=row_count)

    monkeypatch.setattr(Decoder, "head", counting)
    return rows


def test_a_long_prompt_at_a_wide_vocabulary_stays_small(rows_of_head: list[int]) -> None:
    """All prompt logits would be 3.9 GiB; a step's largest tensor is a few MiB."""
    model = build(torch.bfloat16, vocab=WIDE, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    tokens = tuple(i * 7919 % WIDE for i in range(PROMPT))
    session = Session(model, num_slots=1, capacity=PROMPT + 8)
    session.admit(Request(tokens, 3, PromptLookup(), logprobs=True))
    with Largest() as largest:
        emitted = list(session.drain())
    assert sum(len(e.tokens) for e in emitted) == 3
    assert max(rows_of_head) <= 3
    assert sum(rows_of_head) <= 3 * 3
    assert 4 * WIDE <= largest.nbytes < 8 * MIB


def test_the_measure_sees_prompt_logits() -> None:
    with Largest() as largest:
        torch.zeros(100, 16).matmul(torch.zeros(16, 1000))[:3].clone()
    assert largest.nbytes == 400_000


@pytest.mark.parametrize("length", [1, 2, 8, 9, 17, 40])
def test_chunks_start_at_fixed_places(
    models: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Whatever else runs; the last prompt token is the root of the first draft."""
    spans: dict[int, list[tuple[int, int]]] = {}
    session = Session(models(torch.float32), num_slots=3, capacity=64, chunk=8, prefill_budget=20)
    commit = session.cache.commit

    def noting(slots: list[int], paths: list[range]) -> None:
        for slot, path in zip(slots, paths, strict=True):
            spans.setdefault(slot, []).append((session.cache.lengths[slot], len(path)))
        commit(slots, paths)

    monkeypatch.setattr(session.cache, "commit", noting)
    first = session.admit(Request((3,) * length, 2, NoDrafts()))
    others = [session.admit(Request((5,) * 30, 2, NoDrafts())) for _ in range(2)]
    emitted = list(session.drain())
    assert {e.request_id for e in emitted} == {first, *others}
    (own,) = [s for s in spans.values() if sum(n for _, n in s) == length + 1][:1]
    chunks = own[:-2]
    assert chunks == [(at, min(8, length - 1 - at)) for at in range(0, length - 1, 8)]
    assert own[-2:] == [(length - 1, 1), (length, 1)]


def test_a_pass_heeds_the_budget(models: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = Decoder.run

    def noting(self: Decoder, h: Tensor, *args: Any) -> Tensor:
        rows.append(len(h))
        return run(self, h, *args)

    monkeypatch.setattr(Decoder, "run", noting)
    session = Session(models(torch.float32), num_slots=6, capacity=64, chunk=8, prefill_budget=20)
    finish(session, [Request((5,) * 33, 1, NoDrafts()) for _ in range(6)])
    assert max(rows) == 16
    assert sum(rows) == 6 * 33
    rows.clear()
    session = Session(models(torch.float32), num_slots=2, capacity=64, chunk=16, prefill_budget=4)
    finish(session, [Request((5,) * 33, 1, NoDrafts()) for _ in range(2)])
    assert max(rows) == 16, "one chunk runs even where it is more than the budget"


def test_decoding_goes_on_while_others_prefill(models: Callable[..., Decoder]) -> None:
    session = Session(models(torch.float32), num_slots=2, capacity=64, chunk=4)
    quick = session.admit(Request((1, 2), 10, NoDrafts()))
    slow = session.admit(Request((3,) * 30, 10, NoDrafts()))
    seen = [{e.request_id for e in session.step()} for _ in range(9)]
    assert seen[:7] == [{quick}] * 7
    assert seen[7] == {quick, slow}


def test_progress_is_told(models: Callable[..., Decoder]) -> None:
    """It never goes back, also when one prompt is in before another, joins late, or is given up."""
    told: list[tuple[int, int]] = []
    session = Session(models(torch.float32), num_slots=2, capacity=64, chunk=8, progress=lambda *now: told.append(now))
    finish(session, [Request((5,) * length, 1, NoDrafts()) for length in (33, 11)])
    assert told == [(16, 42), (26, 42), (34, 42), (42, 42)]
    told.clear()
    session.admit(Request((5,) * 33, 1, NoDrafts()))
    session.step()
    given_up = session.admit(Request((5,) * 20, 1, NoDrafts()))
    session.step()
    session.cancel(given_up)
    session.step()
    session.step()
    finish(session, [Request((5,) * 3, 1, NoDrafts())])
    assert told == [(8, 32), (24, 51), (32, 40), (40, 40), (2, 2)]
    told.clear()
    given_up = session.admit(Request((5,) * 33, 1, NoDrafts()))
    session.step()
    session.cancel(given_up)
    finish(session, [Request((5,) * 3, 1, NoDrafts())])
    assert told == [(8, 32), (2, 2)]


def test_the_first_chunks_have_the_bits_of_decoding(body: NativeBody) -> None:
    """Row by row, with native kernels: a prompt is stored as if each of its tokens had been decided alone."""
    model = build(torch.bfloat16).requires_grad_(False)
    pack_decoder(model, body)
    prompt = tuple(i * 7 % VOCAB for i in range(40))
    session = Session(model, num_slots=1, capacity=64, chunk=16)
    session.admit(Request(prompt, 2, NoDrafts()))
    while session.cache.lengths[0] < len(prompt) - 1:
        session.step()
    alone, climb = model.new_cache(1, 64), ForwardPass()
    with torch.inference_mode():
        for token in prompt[:-1]:
            climb.run(model, Draft.committed_only({0: [token]}), alone)
            alone.commit([0], [range(1)])
    for layer in range(model.config.num_layers):
        for ours, theirs in zip(session.cache.stored(layer), alone.stored(layer), strict=True):
            assert torch.equal(ours[0, :, : len(prompt) - 1], theirs[0, :, : len(prompt) - 1])


def test_how_a_chunk_goes_up_depends_on_its_place_alone(
    models: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models(torch.float32)
    monkeypatch.setattr(model.backend, "rows_up_to", 16)
    session = Session(model, num_slots=3, capacity=64, chunk=8)
    seen: list[tuple[bool, int]] = []
    run = session._climb.run

    def noting(model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        ends = {cache.lengths[slot] + given for slot, given in zip(draft.slots, draft.committed, strict=True)}
        seen.extend((chunk, end) for end in ends)
        return run(model, draft, cache, chunk=chunk)

    monkeypatch.setattr(session._climb, "run", noting)
    session.admit(Request((5,) * 30, 1, NoDrafts()))
    session.step()
    session.step()
    for length in (30, 12):
        session.admit(Request((5,) * length, 1, NoDrafts()))
    assert len({e.request_id for e in session.drain()}) == 3
    assert {end for chunk, end in seen if chunk} == {24, 29}
    assert {end for chunk, end in seen if not chunk} == {8, 16, 11}

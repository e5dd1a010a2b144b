"""Prefill goes in chunks, never computes logits of a prompt, and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.decode.failing import outcomes
from tests.decode.runs import finish
from tests.decode.tiny_decoders import VOCAB, build, prompts
from vivace.core.cache import KVCache
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts, NoMemory
from vivace.decode.prefill import FULL, FullPrefill, PrefillPass, PrefillState, PromptPiece
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
        stored = (cache.span(layer, 0, 0, len(prompt) - 1) for cache in (session.cache, alone))
        assert all(map(torch.equal, *stored))


def test_how_a_chunk_goes_up_depends_on_its_place_alone(
    models: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models(torch.float32)
    monkeypatch.setattr(model.backend, "rows_up_to", 16)
    session, reader = Session(model, num_slots=3, capacity=64, chunk=8), Noting()
    session.admit(Request((5,) * 30, 1, NoDrafts(), prefill=reader))
    session.step()
    session.step()
    for length in (30, 12):
        session.admit(Request((5,) * length, 1, NoDrafts(), prefill=reader))
    assert len({e.request_id for e in session.drain()}) == 3
    passes = [{(piece.kind, piece.stop) for piece in pieces.values()} for pieces in reader.passes]
    assert all(len({kind for kind, _ in each}) == 1 for each in passes), "pieces of one kind share a pass"
    ends = set().union(*passes)
    assert {end for kind, end in ends if kind == "chunks"} == {24, 29}
    assert {end for kind, end in ends if kind == "rows"} == {8, 16, 11}


class Noting(FullPrefill):
    """Fills ``Prefill``: notes the pieces of every pass."""

    def __init__(self) -> None:
        self.passes: list[dict[int, PromptPiece]] = []

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        state = super().open(model, cache, chunk=chunk)
        read = state.read

        def noting(pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
            self.passes.append(dict(pieces))
            return read(pieces, prompts)

        state.read = noting  # type: ignore[method-assign]
        return state


class ByHalves:
    """Fills ``Prefill``: all of a prompt goes through the lower layers first, chunk by chunk, then through the others.

    A pass of its own, in pieces that are rows times a span of layers, with residuals that wait in between: what a
    prefill needs that decides half way which tokens go on. ``keeps`` says which do; here the others leave nothing in
    the upper layers. Nothing is committed before the last piece.
    """

    name = "halves"

    def __init__(self, keeps: Callable[[int], bool] = lambda position: True) -> None:
        self.keeps = keeps
        self.is_exact = False

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        return Halves(self, model, cache, chunk)


class Halves(NoMemory):
    """Fills ``PrefillState``."""

    def __init__(self, prefill: ByHalves, model: Decoder, cache: KVCache, chunk: int) -> None:
        self.prefill, self.model, self.cache, self.chunk = prefill, model, cache, chunk
        self.middle = model.config.num_layers // 2
        self.waiting: dict[int, dict[int, Tensor]] = {}
        """By slot and position: residuals entering the upper layers."""

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> list[PromptPiece]:
        assert not known, "entries of others are not those of this prefill"
        last = len(prompt) - 1
        self.waiting[slot] = {}
        lower = [(first, min(first + self.chunk, last)) for first in range(0, last, self.chunk)]
        upper = [PromptPiece(0, last, "upper", last)] if last else []
        return [*(PromptPiece(*span, "lower", 0) for span in lower), *upper]

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        is_lower = next(iter(pieces.values())).kind == "lower"
        places = [(slot, at) for slot, piece in pieces.items() for at in range(piece.first, piece.stop)]
        if is_lower:
            step = Step.at(self.cache, [slot for slot, _ in places], [at for _, at in places])
            step = replace(step, is_prompt=True)
            h = self.model.embed(torch.tensor([prompts[slot][at] for slot, at in places]), step)
            for (slot, at), row in zip(places, self.model.run(h, step, 0, self.middle), strict=True):
                self.waiting[slot][at] = row
            return PrefillPass(Draft.committed_only({}), TargetPass(h[:0], torch.arange(0)), {})
        going = [(slot, at) for slot, at in places if self.prefill.keeps(at)]
        gone = {slot: {at for other, at in places if other == slot and not self.prefill.keeps(at)} for slot in pieces}
        readable = {
            slot: torch.tensor([at for at in range(piece.stop) if at not in gone[slot]])
            for slot, piece in pieces.items()
        }
        step = Step.at(self.cache, [slot for slot, _ in going], [at for _, at in going], readable=readable)
        step = replace(step, is_prompt=True)
        h = self.model.run(torch.stack([self.waiting[slot][at] for slot, at in going]), step, self.middle)
        out = Draft.committed_only(
            {slot: [prompts[slot][at] for other, at in going if other == slot] for slot in pieces}, is_prompt=True
        )
        return PrefillPass(out, TargetPass(h, torch.arange(len(h))), {slot: p.stop for slot, p in pieces.items()})

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.waiting.pop(slot, None)


def test_a_prefill_may_run_a_pass_of_its_own(models: Callable[..., Decoder]) -> None:
    """Interval by interval, beside prompts that are read as ever: the texts are the same."""
    model = models(torch.float32)
    halves = ByHalves()
    session = Session(model, num_slots=3, capacity=64, chunk=8, prefill_budget=20)
    asked = [Request(prompt, 9, PromptLookup()) for prompt in prompts(6, seed=2)]
    wanted = finish(session, asked, every=2)
    mixed = [replace(request, prefill=halves) if place % 2 else request for place, request in enumerate(asked)]
    for ours, theirs in zip(finish(session, mixed, every=2), wanted, strict=True):
        assert (ours.tokens, ours.reason) == (theirs.tokens, theirs.reason)


def test_what_a_prefill_leaves_out_is_not_there(models: Callable[..., Decoder]) -> None:
    """Every other token stops half way: the lower entries are those of a full prefill, the upper ones are missing."""
    model = models(torch.bfloat16)
    stored = []
    for prefill in (FULL, ByHalves(lambda position: position % 2 == 0)):
        session = Session(model, num_slots=1, capacity=64, chunk=8)
        told: list[tuple[int, int]] = []
        session.progress = lambda *now, told=told: told.append(now)  # type: ignore[misc]
        session.admit(Request(tuple(range(1, 22)), 2, NoDrafts(), prefill=prefill))
        while not told or told[-1][0] < 20:
            assert session.cache.lengths[0] == (0 if prefill is not FULL else told[-1][0] if told else 0)
            session.step()
        stored.append([list(session.cache.span(layer, 0, 0, 20)) for layer in range(3)])
        assert told[-1] == (20, 20)
        assert len(list(session.drain())) > 0
    full, pruned = stored
    for place in (0, 1):
        assert torch.equal(full[0][place], pruned[0][place])
        assert not pruned[2][place][:, 1::2].any()
        assert pruned[2][place][:, ::2].any()


class Kept:
    """Fills ``Prefix``: counts what it is asked for."""

    keeps_answers = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> Sequence[Tensor]:
        self.calls.append("attach")
        return []

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        self.calls.append("keep")


def test_only_exact_entries_are_shared(models: Callable[..., Decoder]) -> None:
    for prefill, calls in ((FULL, ["attach", "keep"]), (ByHalves(), [])):
        prefix = Kept()
        session = Session(models(torch.bfloat16), num_slots=1, capacity=64, chunk=8)
        finish(session, [Request((5,) * 20, 2, NoDrafts(), prefill=prefill, prefix=prefix)])
        assert prefix.calls == calls


def test_a_prefill_that_fails_ends_its_own_request(models: Callable[..., Decoder]) -> None:
    """In its plan or in a pass, and the state of its slot goes with it."""

    class Failing(ByHalves):
        def keeps(self, position: int) -> bool:  # type: ignore[override]
            raise ZeroDivisionError("planted")

        def __init__(self) -> None:
            self.is_exact = False

    session = Session(models(torch.bfloat16), num_slots=2, capacity=64, chunk=8)
    good, bad = Request((5,) * 20, 4, NoDrafts()), Request((6,) * 20, 4, NoDrafts(), prefill=Failing())
    [wanted] = finish(session, [good])
    found = outcomes(session, [good, bad])
    assert tuple(found[0].tokens) == wanted.tokens
    assert (found[1].reason, found[1].tokens) == ("error", [])
    assert "planted" in str(found[1].error)
    assert not session._live

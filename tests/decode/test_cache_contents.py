"""After every step the cache is what a prefill of the text would have left, and nothing else is ever read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from tests.core.entries import spoil
from tests.decode.oracles import Text
from tests.decode.runs import Result, finish
from tests.decode.scripted_drafters import RIGHTNESS, Scripted
from tests.decode.tiny_decoders import VOCAB
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.07}  # two units in the last place of values near 8
SHAPES = [(1, 1, 1), (3, 2, 1)]


@torch.inference_mode()
def assert_as_after_prefill(model: Decoder, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
    length = cache.lengths[slot]
    step = Step.dense(1, length)
    model.run(model.embed(torch.tensor(tokens[:length]), step), step)
    for layer in range(model.config.num_layers):
        for fresh, stored in zip(step.memory.stored(layer), cache.span(layer, slot, 0, length), strict=True):
            torch.testing.assert_close(stored, fresh[0], atol=TOLERANCE[model.dtype], rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("right", RIGHTNESS)
def test_the_cache_is_that_of_a_prefill(
    models: Models, plain: Plain, dtype: torch.dtype, right: str, shape: tuple[int, ...]
) -> None:
    model, texts = models(dtype), plain(dtype)[:6]
    known = [[*t.prompt, *t.new] for t in texts]
    drafter = Scripted(known, VOCAB, shape=shape, is_right=RIGHTNESS[right], is_ragged=True)
    session = Session(model, num_slots=3, capacity=64, chunk=8)
    for text in texts:
        session.admit(Request(text.prompt, 9, drafter))
    compared = 0
    while not session.is_idle:
        session.step()
        for slot, sequence in session._live.items():
            assert session.cache.lengths[slot] == len(sequence.tokens) - 1 or sequence.pieces
            assert_as_after_prefill(model, session.cache, slot, sequence.tokens)
            compared += session.cache.lengths[slot]
    assert compared > 100


def poison(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every commit, truncate and release, spoil all entries beyond a slot's length.

    NaN where rows are cut to what they see (float32); a huge finite number in bfloat16, whose additive mask
    makes the weight of an unseen entry exactly zero.
    """

    def spoil_all() -> None:
        spoil(cache, float("nan") if cache.store.dtype == torch.float32 else 1e30)

    for name in ("commit", "truncate", "release"):
        method = getattr(cache, name)

        def spoiling(*args: Iterable[object], method: Callable[..., None] = method) -> None:
            method(*args)
            spoil_all()

        monkeypatch.setattr(cache, name, spoiling)
    spoil_all()


@pytest.mark.parametrize("shape", [(), *SHAPES], ids=str)
@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_nothing_beyond_the_text_is_read(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    window: int | None,
    plain: Plain,
) -> None:
    model = models(dtype, windows=(window, None, window))
    prompts = [t.prompt for t in plain(dtype)[:7]]

    def run(drafter: object, *, poisoned: bool) -> list[Result]:
        session = Session(model, num_slots=3, capacity=64, chunk=8)
        if poisoned:
            poison(session.cache, monkeypatch)
        requests = [Request(p, 5 + i, drafter, logprobs=True) for i, p in enumerate(prompts)]  # type: ignore[arg-type]
        return finish(session, requests, every=1)

    clean = run(NoDrafts(), poisoned=False)
    known = [[*p, *r.tokens] for p, r in zip(prompts, clean, strict=True)]
    drafter = Scripted(known, VOCAB, shape=shape, is_right=RIGHTNESS["sometimes"], is_ragged=True)
    for got, want in zip(run(drafter, poisoned=True), clean, strict=True):
        assert (got.tokens, got.logprobs, got.reason) == (want.tokens, want.logprobs, want.reason)


def test_the_poison_works(models: Models, monkeypatch: pytest.MonkeyPatch, plain: Plain, dtype: torch.dtype) -> None:
    """A cache that believes to be one entry longer than it is changes the answer."""
    session = Session(models(dtype), num_slots=1, capacity=64, chunk=8)
    poison(session.cache, monkeypatch)
    text = plain(dtype)[3]
    session.admit(Request(text.prompt, 8, NoDrafts(), logprobs=True))
    session.step()
    while session._live and session._live[0].pieces:
        session.step()
    session.cache.lengths[0] += 1
    session._live[0].tokens.insert(0, 0)
    (emitted,) = session.step()
    assert emitted.logprobs is not None
    assert not emitted.logprobs[0] <= 0 or emitted.logprobs[0] not in text.logprobs

"""Greedy output is plain decoding's, token for token and bit for bit, whatever is drafted and whoever joins."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.decode.oracles import Text, plain_text, recomputed_text
from tests.decode.runs import Result, finish
from tests.decode.scripted_drafters import RIGHTNESS, Scripted
from tests.decode.tiny_decoders import VOCAB, prompts
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass, Verdict
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import CapacityError, ConfigError

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]
SHAPES = [(1,), (1, 1, 1, 1), (3,), (3, 2, 1), (2, 2, 2), (1, 3)]
LIMITS = [1 + (7 * i) % 24 for i in range(16)]


def known(texts: list[Text]) -> list[list[int]]:
    return [[*text.prompt, *text.new] for text in texts]


def check(got: Result, text: Text, count: int) -> None:
    assert got.tokens == text.new[:count]
    assert got.logprobs == text.logprobs[:count]
    assert got.reason == "length"
    assert got.stats.num_tokens == count
    assert got.stats.num_prompt_tokens == len(text.prompt)


def test_the_oracle_agrees_with_recomputing_everything(models: Models) -> None:
    model = models(torch.float32)
    distinct: set[int] = set()
    for prompt in prompts(8):
        text = plain_text(model, prompt, 24)
        assert text.new == recomputed_text(model, prompt, 24)
        distinct |= set(text.new)
    assert len(distinct) > 40, "a decoder that repeats itself proves nothing"


@pytest.mark.slow_where(lambda dtype, shape, right: dtype == torch.float32 and shape not in ((1,) * 4, (3, 2, 1)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("right", RIGHTNESS)
def test_greedy_output_is_plain_decodings(
    models: Models, plain: Plain, dtype: torch.dtype, right: str, shape: tuple[int, ...]
) -> None:
    texts = plain(dtype)
    drafter = Scripted(known(texts), VOCAB, shape=shape, is_right=RIGHTNESS[right], is_ragged=True)
    session = Session(models(dtype), num_slots=5, capacity=64, chunk=8, prefill_budget=16)
    requests = [Request(t.prompt, n, drafter, logprobs=True) for t, n in zip(texts, LIMITS, strict=True)]
    results = finish(session, requests, every=2)
    for got, text, count in zip(results, texts, LIMITS, strict=True):
        check(got, text, count)
    accepted = sum(r.stats.num_accepted_draft_tokens for r in results)
    drafted = sum(r.stats.num_draft_tokens for r in results)
    assert drafted > 0
    assert (accepted == 0) if right == "never" else accepted > 0
    if right == "always" and max(shape) == 1:
        assert accepted == drafted


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
def test_any_batch_size(models: Models, plain: Plain, dtype: torch.dtype, batch: int) -> None:
    texts = plain(dtype)[-batch:]
    drafter = Scripted(known(texts), VOCAB, shape=(2, 1, 2), is_right=RIGHTNESS["sometimes"])
    session = Session(models(dtype), num_slots=batch, capacity=64, chunk=8)
    results = finish(session, [Request(t.prompt, 20, drafter, logprobs=True) for t in texts])
    for got, text in zip(results, texts, strict=True):
        check(got, text, 20)


def test_methods_may_share_a_session(models: Models, plain: Plain, dtype: torch.dtype) -> None:
    texts = plain(dtype)
    methods = [NoDrafts(), PromptLookup(), Scripted(known(texts), VOCAB, shape=(2, 2))]
    session = Session(models(dtype), num_slots=6, capacity=64, chunk=8)
    requests = [
        Request(t.prompt, n, methods[i % 3], logprobs=True) for i, (t, n) in enumerate(zip(texts, LIMITS, strict=True))
    ]
    for got, text, count in zip(finish(session, requests, every=1), texts, LIMITS, strict=True):
        check(got, text, count)


def test_slots_are_used_again(models: Models, plain: Plain, dtype: torch.dtype) -> None:
    texts = plain(dtype)
    drafter = Scripted(known(texts), VOCAB, is_right=RIGHTNESS["sometimes"])
    session = Session(models(dtype), num_slots=1, capacity=64, chunk=8)
    requests = [Request(t.prompt, n, drafter, logprobs=True) for t, n in zip(texts, LIMITS, strict=True)]
    for got, text, count in zip(finish(session, requests), texts, LIMITS, strict=True):
        check(got, text, count)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of a decoder's layers."""
    seen: list[int] = []
    run = Decoder.run

    def counting(self: Decoder, h: Tensor, *args: object, **kwargs: object) -> Tensor:
        seen.append(len(h))
        return run(self, h, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "run", counting)
    return seen


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2)], ids=str)
def test_a_step_is_one_pass_whatever_the_batch(
    models: Models, plain: Plain, calls: list[int], batch: int, shape: tuple[int, ...]
) -> None:
    texts = plain(torch.bfloat16)[:batch]
    calls.clear()
    drafter = Scripted(known(texts), VOCAB, shape=shape, is_right=RIGHTNESS["sometimes"], is_ragged=True)
    session = Session(models(torch.bfloat16), num_slots=batch, capacity=64)
    for text in texts:
        session.admit(Request(text.prompt, 12, drafter))
    prefills = 1 if batch > 1 else 0  # the only prompt of a batch of one is its root
    while not session.is_idle:
        before = len(calls)
        session.step()
        assert len(calls) - before == 1 + prefills
        prefills = 0
    assert session.num_target_passes == len(calls) - (batch > 1)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 21])
def test_right_guesses_save_passes(models: Models, plain: Plain, num_drafts: int, count: int) -> None:
    texts = plain(torch.bfloat16)
    drafter = Scripted(known(texts), VOCAB, shape=(1,) * num_drafts)
    session = Session(models(torch.bfloat16), num_slots=16, capacity=64, chunk=8)
    for result in finish(session, [Request(t.prompt, count, drafter) for t in texts[8:9]]):
        assert result.stats.num_spec_steps == -(-count // (num_drafts + 1))
    assert session.num_target_passes == -(-count // (num_drafts + 1))


def test_nothing_is_drafted_past_the_limit(models: Models, plain: Plain) -> None:
    """What the session offers (``max_nodes``) is what can still be used: all guesses of a right drafter count."""
    texts = plain(torch.bfloat16)
    drafter = Scripted(known(texts), VOCAB, shape=(1,) * 5)
    session = Session(models(torch.bfloat16), num_slots=4, capacity=64)
    for result, count in zip(
        finish(session, [Request(t.prompt, n, drafter) for t, n in zip(texts, LIMITS, strict=True)]),
        LIMITS,
        strict=True,
    ):
        stats = result.stats
        assert stats.num_draft_tokens == stats.num_accepted_draft_tokens
        assert stats.num_accepted_draft_tokens + stats.num_spec_steps == count


def test_cancel_frees_the_slot_and_disturbs_nobody(models: Models, plain: Plain, dtype: torch.dtype) -> None:
    texts = plain(dtype)[:8]
    drafter = Scripted(known(texts), VOCAB, shape=(2, 1), is_right=RIGHTNESS["sometimes"])
    session = Session(models(dtype), num_slots=4, capacity=64, chunk=8)
    ids = [session.admit(Request(t.prompt, 16, drafter, logprobs=True)) for t in texts]
    results = {request_id: Result() for request_id in ids}
    for step in range(200):
        if session.is_idle:
            break
        if step == 2:
            session.cancel(ids[1])  # in the middle of its answer
            session.cancel(ids[6])  # still waiting
            session.cancel(12345)
        for emitted in session.step():
            assert step < 2 or emitted.request_id not in (ids[1], ids[6])
            results[emitted.request_id].add(emitted)
    assert session.is_idle
    session.cancel(ids[0])  # finished long ago
    assert results[ids[6]].tokens == ()
    assert 0 < len(results[ids[1]].tokens) < 16
    assert results[ids[1]].tokens == texts[1].new[: len(results[ids[1]].tokens)]
    for place in (0, 2, 3, 4, 5, 7):
        check(results[ids[place]], texts[place], 16)
    assert session.cache.lengths == [0] * 4
    check(finish(session, [Request(texts[1].prompt, 16, drafter, logprobs=True)])[0], texts[1], 16)


def test_cancel_during_prefill(models: Models, plain: Plain, dtype: torch.dtype) -> None:
    texts = sorted(plain(dtype), key=lambda t: -len(t.prompt))[:2]
    session = Session(models(dtype), num_slots=1, capacity=64, chunk=8)
    first = session.admit(Request(texts[0].prompt, 8, NoDrafts()))
    assert session.step() == []
    session.cancel(first)
    assert session.is_idle
    check(finish(session, [Request(texts[1].prompt, 8, NoDrafts(), logprobs=True)])[0], texts[1], 8)


class Listener(NoDrafts):
    """Notes which slots it is told about, and what it was shown of their prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[int] = set()
        self.prompts: dict[int, list[int]] = {}
        self.shown: dict[int, list[Tensor]] = {}

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        self.heard |= set(draft.slots)
        if verdict is None:
            for token, slot, hidden in zip(draft.tokens.tolist(), draft.slot.tolist(), passed.hidden, strict=True):
                self.prompts.setdefault(slot, []).append(token)
                self.shown.setdefault(slot, []).append(hidden)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.heard |= set(slots)


def test_a_drafter_hears_of_its_own_sequences_only(models: Models, plain: Plain) -> None:
    texts = [t for t in plain(torch.bfloat16) if len(t.prompt) > 3][:6]
    both, alone = [Listener(), Listener()], Listener()
    for listeners in (both, [alone, alone]):
        session = Session(models(torch.bfloat16), num_slots=6, capacity=64, chunk=8)
        finish(session, [Request(t.prompt, 3, listeners[i % 2]) for i, t in enumerate(texts)])
    assert both[0].heard == {0, 2, 4}
    assert both[1].heard == {1, 3, 5}
    for slot, text in enumerate(texts):
        listener = both[slot % 2]
        assert tuple(listener.prompts[slot]) == text.prompt[:-1]
        assert torch.equal(torch.stack(listener.shown[slot]), torch.stack(alone.shown[slot]))


def test_memory_is_flat(models: Models) -> None:
    lookup = PromptLookup()
    session = Session(models(torch.bfloat16), num_slots=4, capacity=64)

    def census() -> Counter[str]:
        gc.collect()
        kinds = [type(o) for o in gc.get_objects()]
        return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith(("torch", "vivace")))

    def some(seed: int) -> None:
        finish(session, [Request(p, 6, lookup, logprobs=True) for p in prompts(20, seed=seed)])

    some(0)
    before = census()
    some(1)
    some(2)
    after = census()
    assert {name: count for name, count in after.items() if count > before[name]} == {}
    assert after["LookupState"] == 0, "what drafters remember goes with the last request that names them"


def test_what_does_not_fit_is_refused(models: Models) -> None:
    session = Session(models(torch.float32), num_slots=1, capacity=32)
    with pytest.raises(CapacityError, match=r"20 tokens and max_new_tokens is 13, together 33; the context holds 32"):
        session.admit(Request((1,) * 20, 13, NoDrafts()))
    session.admit(Request((1,) * 20, 12, NoDrafts()))
    with pytest.raises(ConfigError, match="prompt is empty"):
        Request((), 1, NoDrafts())
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, found 0"):
        Request((1,), 0, NoDrafts())

"""Beam search in a session: against beams that are copied, beside other requests, and where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import backend_of
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling, bar_repeats, penalise
from vivace.core.step import Step
from vivace.decode.beams import BeamPlan, BeamSearch, Candidate, Hypothesis, largest
from vivace.decode.distributions import processed
from vivace.decode.lookup import PromptLookup
from vivace.decode.memory import MemoryBudget
from vivace.decode.plain import NoDrafts
from vivace.decode.prefill import FULL
from vivace.decode.prefix import CHUNK, PrefixCache
from vivace.decode.request import Emitted, Request, StopRule
from vivace.decode.session import Session
from vivace.errors import CapacityError, ConfigError, DecodingError, UnsupportedError
from vivace.kernels.choice import choose

Models = Callable[..., Decoder]
CPU = torch.device("cpu")
PLAIN = NoDrafts()
PLANS = [BeamPlan(2), BeamPlan(4, 3, 2.0, early_stopping=True), BeamPlan(5, 5, 0.5, early_stopping="never")]


def searched(tokens: Sequence[int], plan: BeamPlan, *, most: int = 20, **more: object) -> Request:
    stop = StopRule(end_tokens=frozenset({3, 11}), min_new_tokens=2)
    return Request(**({"tokens": tuple(tokens), "max_new_tokens": most, "drafter": PLAIN, "stop": stop,
                       "beams": plan} | more))  # type: ignore[arg-type]  # fmt: skip


def found(session: Session, requests: Sequence[Request]) -> list[tuple[Hypothesis, ...]]:
    """What each search has found; what it has streamed is the best text."""
    numbers = [session.admit(request) for request in requests]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, Emitted] = {}
    for emitted in session.drain():
        assert emitted.tokens, "an event brings something"
        texts[emitted.request_id] += emitted.tokens
        ends[emitted.request_id] = emitted
    for number, request in zip(numbers, requests, strict=True):
        if request.beams is not None:
            assert tuple(texts[number]) == ends[number].hypotheses[0].tokens
            assert ends[number].stats.num_tokens == len(texts[number])
    return [ends[number].hypotheses for number in numbers]


@torch.inference_mode()
def forked(model: Decoder, request: Request) -> tuple[Hypothesis, ...]:
    """The same search with a slot for each beam, forked in every step: the slow way that moves whole texts."""
    assert request.beams is not None
    search = BeamSearch(request.beams, len(request.tokens), request.max_new_tokens)
    cache = model.new_cache(2 * request.beams.num_beams, len(request.tokens) + request.max_new_tokens)
    reading = FULL.open(model, cache, chunk=CHUNK)
    for piece in reading.plan(0, request.tokens, 0):
        stored = reading.read({0: piece}, {0: request.tokens}).stored[0]
        cache.commit([0], [range(stored)])
    slots, last = [0], list(request.tokens[-1:])
    while not search.is_done:
        step = Step.at(cache, slots, [cache.lengths[slot] for slot in slots])
        hidden = model.run(model.embed(torch.tensor(last), step), step)
        cache.commit(slots, [[0]] * len(slots))
        logprobs = torch.log_softmax(model.head(hidden), -1)
        scores = processed(request, torch.tensor([[*request.tokens, *own] for own in search.ids.tolist()]), logprobs)
        before = search.ids
        count = search.num_candidates(len(request.stop.end_tokens))
        candidates = search.best_of(*(part.numpy() for part in largest(scores, count)), count)
        search.take(candidates, lambda _, token: request.stop.ends_with(token, search.length + 1))
        free = [slot for slot in range(cache.num_slots) if slot not in slots]
        above = [before.tolist().index(own[:-1]) for own in search.ids.tolist()]
        targets = free[: len(above)]
        cache.fork([slots[row] for row in above], targets)
        cache.release(slots)
        slots, last = targets, search.ids[:, -1].tolist()
    return tuple(search.hypotheses[: request.beams.num_return_sequences])


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_paths_in_one_slot_have_the_bits_of_copied_beams(models: Models, dtype: torch.dtype, plan: BeamPlan) -> None:
    model = models(dtype)
    requests = [searched(prompt, plan) for prompt in prompts(4)]
    sampling = Sampling(no_repeat_ngram_size=2, repetition_penalty=1.2)
    requests.append(searched(prompts(5)[4], plan, sampling=sampling))
    together = found(Session(model, num_slots=3, capacity=150), requests)
    assert together == [forked(model, request) for request in requests]
    alone = [found(Session(model, num_slots=1, capacity=150), [request])[0] for request in requests]
    assert alone == together


def test_other_requests_run_beside_a_search(models: Models, dtype: torch.dtype) -> None:
    model = models(dtype)
    plain = [Request(prompt, 17, PromptLookup()) for prompt in prompts(3)]
    alone = finish(Session(model, num_slots=1, capacity=150), plain)
    search = searched(prompts(6)[5], PLANS[1])
    expected = found(Session(model, num_slots=1, capacity=150), [search])[0]
    session = Session(model, num_slots=4, capacity=150)
    numbers = [session.admit(request) for request in (plain[0], search, *plain[1:])]
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
    for emitted in session.drain():
        texts[emitted.request_id] += emitted.tokens
        if emitted.hypotheses:
            assert emitted.hypotheses == expected
    assert texts == {0: alone[0].tokens, 1: expected[0].tokens, 2: alone[1].tokens, 3: alone[2].tokens}
    assert session.is_idle


@pytest.mark.parametrize("windows", [(), (6, None, 6)])
def test_windows_and_native_kernels(models: Models, windows: tuple[int | None, ...]) -> None:
    model = models(torch.float32, windows=windows, seed=5)
    requests = [searched(prompt, PLANS[1], most=30) for prompt in prompts(3)]
    expected = [forked(model, request) for request in requests]
    assert found(Session(model, num_slots=2, capacity=250), requests) == expected
    body = choose("auto", device=CPU).body
    native = backend_of(body, "bf16", torch.float32, is_required=False, screens_head=False)
    if native is None:
        pytest.skip("no native kernels here")
    copy = build(torch.float32, windows=windows, seed=5)
    copy.run_on(native)
    ours = found(Session(copy, num_slots=2, capacity=250), requests)
    assert ours == [forked(copy, request) for request in requests]
    assert [[one.tokens for one in each] for each in ours] == [[one.tokens for one in each] for each in expected]


def test_a_kept_prompt_is_read_once_and_not_written_to(models: Models) -> None:
    model = models(torch.float32)
    cache = PrefixCache.of(model, 1 << 22)
    prompt = prompts(1, longest=200)[0] * 130
    request = searched(prompt, PLANS[1], prefix=cache.salted(None, b""))
    first, second, third = (found(Session(model, num_slots=2, capacity=400), [request])[0] for _ in range(3))
    assert first == second == third
    session = Session(model, num_slots=2, capacity=400)
    session.admit(request)
    assert list(session.drain())[-1].stats.num_cached_tokens > 0


def test_entries_are_used_again(models: Models) -> None:
    model = models(torch.float32)
    session = Session(model, num_slots=1, capacity=400)
    session.admit(searched([1, 2, 3], BeamPlan(4), most=90, stop=StopRule()))
    most = 0
    while not session.is_idle:
        session.step()
        most = max([most, *(s.search.stop for s in session._live.values() if s.search is not None)])
    assert most < 3 + 4 * 90 / 2, "beams that died leave their entries to others"


def test_where_memory_ends_a_search_waits_and_begins_again(models: Models) -> None:
    model = models(torch.float32, head_dim=16)  # blocks of 64 entries
    search = searched([1, 2, 3], BeamPlan(4), most=60, stop=StopRule())
    expected = found(Session(model, num_slots=1, capacity=500), [search])[0]
    others = [Request((place, 2), 250, PLAIN) for place in (5, 6)]
    session = Session(model, num_slots=3, capacity=500, memory=MemoryBudget(model.slot_bytes(400)))
    assert found(session, [*others, search])[2] == expected
    assert session.num_preemptions > 0


def test_a_processor_that_fails_ends_its_search_only(models: Models) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise ZeroDivisionError("of a user's processor")
        return scores

    model = models(torch.float32)
    good = [searched(prompt, PLANS[0]) for prompt in prompts(2)]
    expected = found(Session(model, num_slots=1, capacity=150), good)
    session = Session(model, num_slots=3, capacity=150)
    bad = searched([1, 2], PLANS[0], processors=(broken,))
    numbers = [session.admit(request) for request in (good[0], bad, good[1])]
    ends = {}
    while not session.is_idle:
        for emitted in session.step():
            ends[emitted.request_id] = emitted
    assert isinstance(ends[numbers[1]].error, DecodingError)
    assert [ends[numbers[0]].hypotheses, ends[numbers[2]].hypotheses] == expected


def test_every_token_barred_is_an_error(models: Models) -> None:
    session = Session(models(torch.float32), num_slots=1, capacity=150)
    session.admit(searched([1, 2], PLANS[0], processors=(lambda _, scores: torch.full_like(scores, -torch.inf),)))
    with pytest.raises(Exception, match="no token may come after"):
        list(session.drain())


def test_a_stop_rule_that_reads_the_text_ends_beams(models: Models) -> None:
    model = models(torch.float32)
    stop = StopRule(criterion=lambda new: sum(new) % 7 == 0)
    hypotheses = found(Session(model, num_slots=1, capacity=150), [searched([5, 6], PLANS[2], stop=stop)])[0]
    assert all(sum(one.tokens) % 7 == 0 for one in hypotheses if one.is_stopped)
    assert any(one.is_stopped for one in hypotheses)


def test_an_end_token_ends_no_text_that_is_too_short() -> None:
    stop = StopRule(end_tokens=frozenset({3}), min_new_tokens=2)
    assert [stop.ends_at(count) for count in (1, 2, 3)] == [frozenset(), frozenset(), frozenset({3})]
    assert [stop.ends_with(3, count) for count in (1, 2, 3)] == [False, False, True]
    assert not stop.stops_at([1, 3])
    assert stop.stops_at([1, 1, 3])


def test_the_last_token_is_forced_for_every_way_to_decode(models: Models) -> None:
    model = models(torch.float32)
    requests = [
        searched([1, 2], PLANS[0], most=6, stop=StopRule(), forced_last=50),
        Request((1, 2), 6, PLAIN, forced_last=50),
        Request((1, 2), 6, PromptLookup(), forced_last=50, sampling=Sampling(do_sample=True, no_repeat_ngram_size=1)),
    ]
    for result in finish(Session(model, num_slots=3, capacity=150), requests):
        assert len(result.tokens) == 6
        assert result.tokens[-1] == 50


def test_processors_bar_and_force_in_all_rows() -> None:
    logprobs = torch.log_softmax(torch.randn(3, 20, generator=torch.Generator().manual_seed(0)), -1)
    request = searched([1, 2], PLANS[0], most=4, barred=(5, 6), forced_last=7)
    early = processed(request, torch.tensor([[1, 2, 8], [1, 2, 9], [1, 2, 10]]), logprobs.clone())
    barred = [3, 5, 6, 11]  # the end tokens, too, before the least length
    assert bool((early[:, barred] == -torch.inf).all())
    others = [token for token in range(20) if token not in barred]
    assert torch.equal(early[:, others], logprobs[:, others])
    last = processed(request, torch.tensor([[1, 2, 8, 8, 8]] * 3), logprobs.clone())
    assert last.argmax(1).tolist() == [7, 7, 7]
    assert bool((last[:, 7] == 0).all())
    assert int(last.isinf().sum()) == 3 * 19


def test_a_search_is_cancelled_and_cannot_be_forked(models: Models) -> None:
    session = Session(models(torch.float32), num_slots=2, capacity=150)
    number = session.admit(searched([1, 2, 3], PLANS[0], stop=StopRule()))
    session.step()
    session.step()
    with pytest.raises(UnsupportedError, match="has beams"):
        session.fork(number)
    session.cancel(number)
    assert session.is_idle
    assert session.cache.nbytes == 0


def test_beams_that_do_not_fit_are_refused(models: Models) -> None:
    session = Session(models(torch.float32), num_slots=1, capacity=50)
    with pytest.raises(CapacityError, match="5 beams of 40 tokens behind a prompt of 1 may need 201 entries"):
        session.admit(searched([1], PLANS[2], most=40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "num_beams must be between 1 and 64, found 0"),
        ({"num_beams": 65}, "num_beams must be between 1 and 64"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences must be between 1 and num_beams, 2, found 3",
        ),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty must be between"),
        ({"num_beams": 2, "length_penalty": 10**400}, "length_penalty must be between"),
        ({"num_beams": 2, "early_stopping": "often"}, "early_stopping must be true, false or 'never', found 'often'"),
    ],
    ids=str,
)
def test_bad_plans(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BeamPlan(**settings)  # type: ignore[arg-type]


def test_the_largest_scores_are_found_in_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (70, 5000, 49_999):
        for count in (1, 8, 16):
            scores = torch.randn(3, length, generator=generator)
            scores[1, -1] = 9.0  # behind the last whole block
            values, places = largest(scores, count)
            assert torch.equal(values, scores.topk(count).values)
            assert torch.equal(scores.gather(1, places), values)
            assert torch.equal(largest(scores[1:2], count)[1], places[1:2]), "a row alone has the same places"


def test_what_is_certain_is_what_all_texts_have_in_common() -> None:
    search = BeamSearch(BeamPlan(2, early_stopping=False), 4, 9)
    for token in (5, 6):
        search.take([Candidate(-1.0, 0, token), Candidate(-2e9, 0, 8)], lambda *_: False)
    search.take([Candidate(-1.5, 0, 7), Candidate(-1.6, 0, 9)], lambda *_: False)
    assert search.num_certain(0) == 2
    assert search.ids.tolist() == [[5, 6, 7], [5, 6, 9]]
    assert search.paths[0, :2].tolist() == search.paths[1, :2].tolist(), "what is in common is stored once"
    assert len(set(search.paths[:, 2].tolist())) == 2
    search.take([Candidate(-1.7, 1, 1), Candidate(-1.8, 1, 2)], lambda *_: False)
    assert search.num_certain(2) == 3, "the beam with 7 has died"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 40])
def test_repeats_are_barred_as_transformers_bars_them(size: int, length: int) -> None:
    texts = torch.randint(0, 4, (9, length), generator=torch.Generator().manual_seed(length))
    scores = torch.randn(9, 7, generator=torch.Generator().manual_seed(size))
    expected = NoRepeatNGramLogitsProcessor(size)(texts, scores.clone())
    one_by_one = scores.clone()
    for row, text in enumerate(texts.tolist()):
        penalise(one_by_one[row], Sampling(no_repeat_ngram_size=size), text)
    bar_repeats(scores, texts, size)
    assert torch.equal(scores, expected)
    assert torch.equal(scores, one_by_one)
    assert length < 40 or bool(scores.isinf().any())


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-100.0, -8.0, 8.0, 100.0])
def test_every_penalty_in_range_ends_with_a_text(penalty: float, early: bool | str) -> None:
    """Powers of lengths leave the range of floats in long texts; the likeliest texts are still found."""
    search = BeamSearch(BeamPlan(2, 1, penalty, early_stopping=early), 1, 2000)  # type: ignore[arg-type]
    while not search.is_done:
        candidates = [Candidate(search.totals[0] - 1.0, 0, 5), Candidate(search.totals[0] - 2.0, 0, 6)]
        search.take(candidates, lambda row, token: search.length >= 1900 and token == 6)
    assert search.hypotheses
    assert not any(one.score != one.score for one in search.hypotheses)

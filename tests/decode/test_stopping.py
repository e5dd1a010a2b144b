"""An end inside an accepted block cuts tokens, log-probabilities, counters and cache where plain decoding ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from tests.decode.oracles import Text, plain_text
from tests.decode.runs import Result, finish
from tests.decode.scripted_drafters import RIGHTNESS, Scripted
from tests.decode.tiny_decoders import VOCAB, prompts
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.errors import ConfigError

Models = Callable[..., Decoder]
NUM_DRAFTS = 5
SHAPES = [(1,) * NUM_DRAFTS, (2, 1, 2, 1, 1)]


@pytest.fixture(scope="module")
def text(models: Models) -> Text:
    """A continuation whose first tokens are all different, so that an end at any of them is unambiguous."""
    candidates = [plain_text(models(torch.bfloat16), prompt, 28) for prompt in prompts(12, seed=5)]
    return max(candidates, key=lambda t: next((n for n in range(28) if t.new[n] in t.new[:n]), 28))


def first_repeat(text: Text) -> int:
    return next((n for n in range(28) if text.new[n] in text.new[:n]), 28)


def spell(tokens: Sequence[int]) -> str:
    """Every token is a word of three letters, so a stop string may end inside one or span two."""
    return "".join(chr(97 + token % 26) + chr(97 + token // 26) + "." for token in tokens)


class Boundary:
    """A session that notes how many entries each slot had stored when it was let go."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch, num_slots: int = 2) -> None:
        self.session = Session(model, num_slots=num_slots, capacity=80, chunk=8)
        self.stored: list[int] = []
        release = self.session.cache.release

        def noting(slots: Sequence[int]) -> None:
            self.stored += [self.session.cache.lengths[slot] for slot in slots]
            release(slots)

        monkeypatch.setattr(self.session.cache, "release", noting)

    def run(self, request: Request) -> Result:
        return finish(self.session, [request])[0]


def agree(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, text: Text, stop: StopRule, drafter: Drafter, limit: int = 28
) -> Result:
    """Run plain and drafted; everything a caller sees is the same."""
    plain, drafted = Boundary(model, monkeypatch), Boundary(model, monkeypatch)
    want = plain.run(Request(text.prompt, limit, NoDrafts(), stop=stop, logprobs=True))
    got = drafted.run(Request(text.prompt, limit, drafter, stop=stop, logprobs=True))
    assert (got.tokens, got.logprobs, got.reason) == (want.tokens, want.logprobs, want.reason)
    assert got.stats.num_tokens == want.stats.num_tokens == len(want.tokens)
    assert drafted.stored == plain.stored == [len(text.prompt) + len(want.tokens) - 1]
    assert drafted.session.cache.lengths == [0, 0]
    return got


@pytest.fixture(params=SHAPES, ids=str)
def drafter(request: pytest.FixtureRequest, text: Text) -> Scripted:
    return Scripted([[*text.prompt, *text.new]], VOCAB, shape=request.param, heeds_limit=False)


def test_end_of_text_at_every_offset(
    models: Models, monkeypatch: pytest.MonkeyPatch, text: Text, drafter: Scripted
) -> None:
    offsets = range(min(first_repeat(text), 2 * (NUM_DRAFTS + 1) + 1))
    assert len(offsets) > NUM_DRAFTS + 2, "every place of a block, and the first of the next"
    for offset in offsets:
        stop = StopRule(end_tokens=frozenset({text.new[offset], VOCAB - 1}))
        got = agree(models(torch.bfloat16), monkeypatch, text, stop, drafter)
        assert got.tokens == text.new[: offset + 1]
        assert got.reason == "stop"
        assert got.stats.num_spec_steps == -(-(offset + 1) // (NUM_DRAFTS + 1))


def test_length_limit_at_every_offset(
    models: Models, monkeypatch: pytest.MonkeyPatch, text: Text, drafter: Scripted
) -> None:
    """Also when the drafter does not heed the limit it is told."""
    for limit in range(1, 2 * (NUM_DRAFTS + 1) + 2):
        got = agree(models(torch.bfloat16), monkeypatch, text, StopRule(), drafter, limit)
        assert got.tokens == text.new[:limit]
        assert got.reason == "length"


def test_stop_string_at_every_offset(
    models: Models, monkeypatch: pytest.MonkeyPatch, text: Text, drafter: Scripted
) -> None:
    for offset in range(1, min(first_repeat(text), 2 * (NUM_DRAFTS + 1) + 1)):
        whole, before = spell(text.new[offset : offset + 1]), spell(text.new[offset - 1 : offset])
        for wanted in (whole, whole[:2], before[-2:] + whole[:2]):
            stop = StopRule(stop_strings=("never.", wanted), detokenize=spell)
            got = agree(models(torch.bfloat16), monkeypatch, text, stop, drafter)
            assert wanted in spell(got.tokens)
            assert wanted not in spell(got.tokens[:-1])
            assert got.reason == "stop"
        assert got.tokens == text.new[: offset + 1]


@cache
def dozen(models: Models, dtype: torch.dtype) -> list[Text]:
    """What plain decoding makes of twelve prompts."""
    return [plain_text(models(dtype), prompt, 28) for prompt in prompts(12, seed=7)]


@pytest.mark.parametrize("right", RIGHTNESS)
def test_ends_in_a_batch_do_not_disturb_the_others(models: Models, dtype: torch.dtype, right: str) -> None:
    model, texts = models(dtype), dozen(models, dtype)
    known = [[*t.prompt, *t.new] for t in texts]
    drafter = Scripted(known, VOCAB, shape=(1, 2, 1), is_right=RIGHTNESS[right], is_ragged=True)
    rules = [
        StopRule(end_tokens=frozenset({t.new[3 * i % 20]}))
        if i % 2
        else StopRule(stop_strings=(spell(t.new[i : i + 2])[1:4],), detokenize=spell)
        for i, t in enumerate(texts)
    ]
    session = Session(model, num_slots=5, capacity=64, chunk=8)
    requests = [Request(t.prompt, 24, drafter, stop=r, logprobs=True) for t, r in zip(texts, rules, strict=True)]
    for got, text, rule in zip(finish(session, requests, every=1), texts, rules, strict=True):
        count = next((n for n in range(1, 25) if rule.stops_at(text.new[:n])), 24)
        assert got.tokens == text.new[:count]
        assert got.logprobs == text.logprobs[:count]
        assert got.reason == ("stop" if rule.stops_at(text.new[:count]) else "length")


@pytest.mark.parametrize("minimum", [1, 3, 4, 9])
def test_end_tokens_are_barred_before_the_minimum(
    models: Models, monkeypatch: pytest.MonkeyPatch, text: Text, drafter: Scripted, minimum: int
) -> None:
    """A barred token is not merely skipped: the next most likely one is taken, in a block as in plain decoding."""
    stop = StopRule(end_tokens=frozenset(text.new[1:4]), min_new_tokens=minimum)
    got = agree(models(torch.bfloat16), monkeypatch, text, stop, drafter)
    assert not stop.end_tokens & set(got.tokens[:minimum])
    assert got.reason == "stop" or len(got.tokens) == 28


def test_penalties_are_applied_at_every_drafted_place(
    models: Models, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Greedy with processors: what was drafted for the bare model must be judged by the processed law."""
    model = models(dtype)
    sampling = Sampling(repetition_penalty=1.3, no_repeat_ngram_size=2)
    for prompt in prompts(2, seed=9):
        want = finish(
            Session(model, num_slots=1, capacity=80),
            [Request(prompt, 28, NoDrafts(), sampling=sampling, logprobs=True)],
        )[0]
        bare = plain_text(model, prompt, 28)
        assert want.tokens != bare.new
        for known in (want.tokens, bare.new):
            for shape in SHAPES:
                drafter = Scripted([[*prompt, *known], [*prompt, *want.tokens]], VOCAB, shape=shape)
                session = Session(model, num_slots=3, capacity=80)
                for got in finish(session, [Request(prompt, 28, drafter, sampling=sampling, logprobs=True)] * 3):
                    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)
        pairs = list(zip(want.tokens, want.tokens[1:], strict=False))
        assert len(set(pairs)) == len(pairs)


def test_a_rule_by_itself() -> None:
    rule = StopRule(end_tokens=frozenset({7}), min_new_tokens=2)
    assert [rule.stops_at(tokens) for tokens in ([7], [1, 7], [1, 1, 7], [7, 7, 1])] == [False, False, True, False]


def test_a_long_stop_string_of_short_pieces() -> None:
    """One byte a token, characters of up to four bytes: the whole string has to be looked at."""
    written = "naïve – 今日は 🙂🙂🙂🙂. The end".encode()
    rule = StopRule(stop_strings=("今日は 🙂🙂🙂🙂",), detokenize=lambda tokens: bytes(tokens).decode(errors="replace"))
    stop = written.index(b". The end")
    assert next(n for n in range(1, len(written) + 1) if rule.stops_at(list(written[:n]))) == stop


def test_stop_strings_have_limits() -> None:
    with pytest.raises(ConfigError, match="a stop string must not be empty"):
        StopRule(stop_strings=("",), detokenize=spell)

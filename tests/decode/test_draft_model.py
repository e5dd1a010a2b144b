"""Two-model speculation: what the draft model guesses, what it runs, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.decode.oracles import Text, plain_text
from tests.decode.runs import finish
from tests.decode.test_cache_contents import assert_as_after_prefill, poison
from tests.decode.tiny_decoders import VOCAB, prompts
from vivace.core.config import RopeConfig
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Context, DraftState
from vivace.decode.context import context_of
from vivace.decode.distributions import Distributions
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.methods.draft.drafter import CHUNK, DraftModel, DraftModelConfig

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]
LIMITS = [1 + (7 * i) % 24 for i in range(16)]
SAMPLED = Sampling(do_sample=True, temperature=0.9, top_p=0.95, repetition_penalty=1.1)


def twin(models: Models, dtype: torch.dtype, num_drafts: int = 3) -> DraftModel:
    """The target drafts for itself: every guess is right."""
    return DraftModel(models(dtype), VOCAB, DraftModelConfig(num_drafts))


def stranger(models: Models, dtype: torch.dtype, num_drafts: int = 4, **changes: object) -> DraftModel:
    return DraftModel(models(dtype, seed=5, num_layers=1, **changes), VOCAB, DraftModelConfig(num_drafts))


@pytest.mark.slow_where(lambda dtype, who: dtype == torch.float32 and who not in ("twin", "stranger"))
@pytest.mark.parametrize("who", ["twin", "stranger", "half", "smaller vocabulary", "larger vocabulary"])
def test_greedy_output_is_plain_decodings(models: Models, plain: Plain, dtype: torch.dtype, who: str) -> None:
    texts = plain(dtype)
    match who:
        case "twin":
            drafter = twin(models, dtype)
        case "half":
            drafter = DraftModel(first_layers(models(dtype), 2), VOCAB)
        case "smaller vocabulary":
            drafter = stranger(models, dtype, vocab=VOCAB - 20)
        case "larger vocabulary":
            drafter = stranger(models, dtype, vocab=VOCAB + 31)
        case _:
            drafter = stranger(models, dtype)
    session = Session(models(dtype), num_slots=5, capacity=64, chunk=8)
    requests = [Request(t.prompt, n, drafter, logprobs=True) for t, n in zip(texts, LIMITS, strict=True)]
    results = finish(session, requests, every=2)
    for got, text, count in zip(results, texts, LIMITS, strict=True):
        assert got.tokens == text.new[:count]
        assert got.logprobs == text.logprobs[:count]
    drafted = sum(r.stats.num_draft_tokens for r in results)
    accepted = sum(r.stats.num_accepted_draft_tokens for r in results)
    assert drafted > 0
    if who == "twin":
        assert accepted == drafted
    if who == "half":
        assert 0 < accepted < drafted, "sometimes right"


def first_layers(model: Decoder, count: int) -> Decoder:
    """A draft model that is often right: the target without its last layers."""
    small = Decoder(replace(model.config, num_layers=count)).to(model.dtype)
    small.load_state_dict({k: v for k, v in model.state_dict().items() if k in small.state_dict()})
    return small


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(number of layers, rows) of every call of a decoder's layers."""
    seen: list[tuple[int, int]] = []
    run = Decoder.run

    def noting(self: Decoder, h: Tensor, *args: object, **kwargs: object) -> Tensor:
        seen.append((self.config.num_layers, len(h)))
        return run(self, h, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "run", noting)
    return seen


@pytest.mark.parametrize("batch", [1, 16])
def test_one_draft_pass_per_depth_whatever_the_batch(
    models: Models, plain: Plain, passes: list[tuple[int, int]], batch: int
) -> None:
    drafter = stranger(models, torch.bfloat16, 3)
    session = Session(models(torch.bfloat16), num_slots=batch, capacity=64)
    for text in plain(torch.bfloat16)[-batch:]:
        session.admit(Request(text.prompt, 20, drafter))
    session.step()  # prompts
    for _ in range(3):
        passes.clear()
        session.step()
        drafts = [rows for layers, rows in passes if layers == 1]
        assert len(drafts) == 3
        assert len(passes) == 4
        assert batch <= drafts[0] <= 2 * batch, "the new token, and a guess that was accepted but never run"
        assert drafts[1:] == [batch, batch]


def test_after_full_acceptance_the_last_guess_is_caught_up(
    models: Models, plain: Plain, passes: list[tuple[int, int]]
) -> None:
    drafter = twin(models, torch.bfloat16)
    session = Session(models(torch.bfloat16), num_slots=1, capacity=64)
    session.admit(Request(plain(torch.bfloat16)[0].prompt, 20, drafter))
    session.step()
    for _ in range(3):
        passes.clear()
        session.step()
        assert [rows for _, rows in passes] == [2, 1, 1, 4]


@pytest.mark.parametrize("who", [twin, stranger])
def test_its_cache_is_that_of_a_prefill(
    models: Models, plain: Plain, dtype: torch.dtype, who: Callable[..., DraftModel]
) -> None:
    drafter = who(models, dtype)
    session = Session(models(dtype), num_slots=3, capacity=64, chunk=8)
    for text, count in zip(plain(dtype), LIMITS, strict=True):
        session.admit(Request(text.prompt, count, drafter))
    drafting, compared = session.drafting(drafter), 0
    while not session.is_idle:
        session.step()
        cache = drafting.cache
        for slot, sequence in session._live.items():
            missing = len(sequence.tokens) - cache.lengths[slot]
            if not sequence.pieces and cache.lengths[slot]:
                assert missing in (1, 2)
                assert_as_after_prefill(drafter.model, cache, slot, sequence.tokens)
                compared += 1
        assert not drafting._unverified
    assert compared > 10
    assert drafting.cache.lengths == [0, 0, 0]


def test_nothing_stale_is_read(models: Models, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cache, poisoned behind every change, gives the same guesses: a twin stays always right."""
    drafter = twin(models, torch.float32)
    session = Session(models(torch.float32), num_slots=2, capacity=64)
    first, *rest = plain(torch.float32)[4:9]
    poison(session.drafting(drafter).cache, monkeypatch)
    stop = StopRule(end_tokens=frozenset(rest[0].new[4:5]))
    asked = [Request(first.prompt, 2, drafter), *(Request(t.prompt, 12, drafter, stop=stop) for t in rest)]
    for got, text in zip(finish(session, asked)[1:], rest, strict=True):
        assert got.tokens == text.new[: len(got.tokens)]
        if got.reason == "length":
            assert got.stats.num_draft_tokens == got.stats.num_accepted_draft_tokens


def context(session: Session, texts: dict[int, list[int]], **fields: object) -> Context:
    for slot, tokens in texts.items():
        session.cache.lengths[slot] = len(tokens) - 1
    distribution = Distributions(dict.fromkeys(texts, Request((1,), 1, NoDrafts())), texts, session.cache.lengths)
    return Context(tuple(texts), texts, session.cache, distribution, **fields)  # type: ignore[arg-type]


def guesses(drafting: DraftState, context: Context) -> dict[int, list[int]]:
    with torch.inference_mode():
        draft = drafting.propose(context)
    return {s: draft.tokens[(draft.slot == s) & (draft.node > 0)].tolist() for s in context.slots}


def test_it_survives_what_a_session_may_do(models: Models) -> None:
    """Drafts never verified, slots cut and let go: the guesses stay what plain decoding makes of the text."""
    model = models(torch.float32)
    session = Session(model, num_slots=3, capacity=64)
    drafter = session.drafting(twin(models, torch.float32))

    def right(tokens: list[int]) -> list[int]:
        return list(plain_text(model, tuple(tokens), 3).new)

    text = list(plain_text(model, (5, 6, 7, 8, 9), 12).new)
    assert guesses(drafter, context(session, {0: text[:6]})) == {0: right(text[:6])}
    assert guesses(drafter, context(session, {0: text[:6]})) == {0: right(text[:6])}, "nobody verified"
    changed = [*text[:5], 50, 51]
    assert guesses(drafter, context(session, {1: changed})) == {1: right(changed)}
    drafter.release([1])
    assert guesses(drafter, context(session, {0: text[:6]})) == {0: right(text[:6])}
    drafter.commit([0], [range(2)])
    assert drafter.cache.lengths[0] == 7
    other = [*text[:6], right(text[:6])[0], 33]
    assert guesses(drafter, context(session, {2: other})) == {2: right(other)}
    drafter.commit([2], [range(4)])
    drafter.truncate([2], [4])
    assert drafter.cache.lengths == [7, 0, 4]
    changed = [*other[:4], 1, 2, 3]
    got = guesses(drafter, context(session, {2: changed, 0: other, 1: [3]}))
    assert got == {2: right(changed), 0: right(other), 1: right([3])}
    drafter.release([0, 1, 2])
    assert drafter.cache.lengths == [0, 0, 0]
    assert not drafter._unverified


def test_a_new_session_is_followed_afresh(models: Models, plain: Plain) -> None:
    drafter = twin(models, torch.bfloat16)
    text = plain(torch.bfloat16)[5]
    for num_slots in (1, 3):
        session = Session(models(torch.bfloat16), num_slots=num_slots, capacity=64)
        session.admit(Request(plain(torch.bfloat16)[6].prompt, 20, drafter))
        session.step()  # left in the middle of its work
        session.cancel(0)
        for got in finish(session, [Request(text.prompt, 12, drafter)] * 3):
            assert got.tokens == text.new[:12]
            assert got.stats.num_draft_tokens == got.stats.num_accepted_draft_tokens


def test_a_prompt_stretches_its_rotation_too(models: Models) -> None:
    """Dynamic rotary looks at the length of the whole prompt: the draft model is told, or a twin would err."""
    rope = RopeConfig(kind="dynamic", factor=4.0, original_positions=8)
    model = models(torch.float32, ropes=(rope,))
    session = Session(model, num_slots=3, capacity=320)
    twins = DraftModel(model, VOCAB, DraftModelConfig(4))
    asked = [prompt * 10 for prompt in prompts(6, seed=8)]
    for got in finish(session, [Request(p, 16, twins) for p in asked]):
        assert got.stats.num_draft_tokens == got.stats.num_accepted_draft_tokens


def test_limits_are_heeded(models: Models, plain: Plain) -> None:
    """No guess past what may be used, none at positions the draft model does not know."""
    session = Session(models(torch.float32), num_slots=2, capacity=64)
    tokens = {0: [1, 2, 3, 4], 1: [5, 6]}
    drafter = session.drafting(twin(models, torch.float32, 4))
    counts = {s: len(g) for s, g in guesses(drafter, context(session, tokens, max_nodes={0: 0, 1: 2})).items()}
    assert counts == {0: 0, 1: 2}
    short = session.drafting(DraftModel(models(torch.float32, max_positions=5, positions="learned"), VOCAB))
    counts = {s: len(g) for s, g in guesses(short, context(session, {0: [1, 2, 3, 4], 1: [5] * 6})).items()}
    assert counts == {0: 2, 1: 0}


def test_long_prompts_go_in_chunks(models: Models, passes: list[tuple[int, int]]) -> None:
    session = Session(models(torch.float32), num_slots=6, capacity=600)
    drafter = session.drafting(stranger(models, torch.float32, 2))
    texts = {slot: [(slot + i) % VOCAB for i in range(400)] for slot in range(6)}
    guesses(drafter, context(session, texts))
    assert [rows for _, rows in passes] == [4 * CHUNK, 4 * 143, 2 * CHUNK, 2 * 143, 6, 6]


def test_ids_the_draft_model_lacks_are_never_guessed(models: Models, plain: Plain) -> None:
    small = stranger(models, torch.bfloat16, vocab=40)
    session = Session(models(torch.bfloat16), num_slots=4, capacity=64)
    for sampling in (Sampling(), SAMPLED):
        for text in plain(torch.bfloat16)[:4]:
            session.admit(Request(text.prompt, 20, small, sampling=sampling))
        while not session.is_idle:
            sequences = [s for s in session._live.values() if not s.pieces]
            if sequences:
                with torch.inference_mode():
                    draft = session.drafting(small).propose(
                        context_of(sequences, session.cache, session.steps_per_call)
                    )
                assert bool((draft.tokens[sum(draft.committed) :] < 40).all())
                if draft.probs is not None:
                    assert draft.probs.shape[1] == VOCAB
                    assert float(draft.probs[sum(draft.committed) :, 40:].sum()) == 0.0
            session.step()


def test_guesses_are_drawn_from_the_processed_law(models: Models, plain: Plain) -> None:
    """A twin under the same processors has the target's own law, so hardly anything is rejected."""
    for dtype in (torch.float32, torch.bfloat16):
        session = Session(models(dtype), num_slots=8, capacity=80)
        sampling = Sampling(
            do_sample=True, temperature=1.3, top_k=12, top_p=0.9, repetition_penalty=1.4, no_repeat_ngram_size=2
        )
        requests = [
            Request(p, 24, twin(models, dtype), sampling=sampling, seed=i) for i, p in enumerate(prompts(8, seed=4))
        ]
        for got in finish(session, requests):
            assert got.stats.num_accepted_draft_tokens == got.stats.num_draft_tokens > 0


def test_at_least_one_guess() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens must be at least 1, found 0"):
        DraftModelConfig(0)

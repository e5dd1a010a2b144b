"""Drafting with the target's own lower layers: nothing changes, and the lower layers run once per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.decode.oracles import Text, chi_square
from tests.decode.runs import finish
from tests.decode.test_cache_contents import assert_as_after_prefill, poison
from tests.decode.test_row_bits import SAMPLINGS
from tests.decode.test_sampled_text import LIKELY, V, exact, sampled_texts, target
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Draft, TargetPass, Verdict
from vivace.core.step import Step
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.errors import ConfigError

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]
GATE = 2
LIMITS = [1 + (7 * i) % 24 for i in range(16)]
PLANS = {
    "chain": DraftPlan.chain(4),
    "tree": DraftPlan((3, 1, 2)),
    "sure chain": DraftPlan((1, 1, 1, 1), min_confidence=0.2),
    "sure tree": DraftPlan((2, 2), min_confidence=0.2),
}


class HeadAtGate:
    """The model's own head on the residual at the gate, as LayerSkip does."""

    def __init__(self, gate: int) -> None:
        self.exit_layer = gate

    draft_rows = None

    def offsets(self, slots: Sequence[int]) -> None:
        """Nothing starts anywhere else."""

    def forward(self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        h = model.run(h, step, 0, self.exit_layer)
        return h, h[guessing]

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""


def drafter(model: Decoder, plan: DraftPlan, *, first: bool = False, gate: int = GATE) -> ShallowDrafter:
    lookup = PromptLookup(LookupConfig(num_draft_tokens=3, min_ngram=1)) if first else None
    return ShallowDrafter(model, HeadAtGate(gate), plan, name="early", first=lookup)


@pytest.mark.slow_where(lambda dtype, first, plan: dtype == torch.float32 and (first or plan in ("tree", "sure chain")))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("first", [False, True], ids=["alone", "after lookup"])
def test_greedy_output_is_plain_decodings(
    models: Models, plain: Plain, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, plan: str, first: bool
) -> None:
    """Tokens and bits, while joining and leaving, with everything spoiled that nobody may read."""
    model, texts = models(dtype), plain(dtype)
    session = Session(model, num_slots=5, capacity=64, chunk=8)
    poison(session.cache, monkeypatch)
    own = drafter(model, PLANS[plan], first=first)
    requests = [Request(t.prompt, n, own, logprobs=True) for t, n in zip(texts, LIMITS, strict=True)]
    results = finish(session, requests, every=2)
    for got, text, count in zip(results, texts, LIMITS, strict=True):
        assert got.tokens == text.new[:count]
        assert got.logprobs == text.logprobs[:count]
        assert got.stats.num_accepted_draft_tokens + got.stats.num_spec_steps == count
    assert sum(r.stats.num_accepted_draft_tokens for r in results) > 0


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_the_cache_is_that_of_a_prefill(models: Models, plain: Plain, dtype: torch.dtype, plan: str) -> None:
    model = models(dtype)
    own = drafter(model, PLANS[plan])
    session = Session(model, num_slots=3, capacity=64, chunk=8)
    for text in plain(dtype)[:5]:
        session.admit(Request(text.prompt, 9, own))
    while not session.is_idle:
        session.step()
        for slot, sequence in session._live.items():
            assert_as_after_prefill(model, session.cache, slot, sequence.tokens)


@pytest.mark.parametrize("batch", [1, 16])
def test_lower_layers_run_once_per_token(
    models: Models, plain: Plain, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """One lower pass per depth for all slots and one upper pass; every row goes through each layer once."""
    spans: list[tuple[int, int | None, int]] = []
    run = Decoder.run

    def noting(
        self: Decoder, h: Tensor, step: Step, start: int = 0, stop: int | None = None, **kwargs: object
    ) -> Tensor:
        spans.append((start, stop, len(h)))
        return run(self, h, step, start, stop, **kwargs)  # type: ignore[arg-type]

    model = models(torch.bfloat16)
    texts = plain(torch.bfloat16)[-batch:]
    monkeypatch.setattr(Decoder, "run", noting)
    session = Session(model, num_slots=batch, capacity=64)
    own = drafter(model, DraftPlan.chain(3))
    for text in texts:
        session.admit(Request(text.prompt, 20, own))
    session.step()
    for _ in range(2):
        spans.clear()
        session.step()
        assert spans == [(0, GATE, batch)] * 4 + [(GATE, None, 4 * batch)]


ON_FLOAT32 = {"chain": "greedy", "tree": "penalised", "sure tree": "filtered"}


@pytest.mark.slow_where(lambda dtype, plan, sampling: dtype == torch.float32 and ON_FLOAT32[plan] != sampling)
@pytest.mark.parametrize("plan", ["chain", "tree", "sure tree"])
@pytest.mark.parametrize("sampling", ["greedy", "penalised", "filtered"])
def test_alone_as_among_others(models: Models, plain: Plain, dtype: torch.dtype, plan: str, sampling: str) -> None:
    model, texts = models(dtype), plain(dtype)
    mixed = list(SAMPLINGS.values())

    def request(place: int, own: ShallowDrafter, how: Sampling) -> Request:
        return Request(texts[place].prompt, 8, own, sampling=how, seed=place, logprobs=True)

    own = drafter(model, PLANS[plan], first=True)
    crowd = [request(i, own, SAMPLINGS[sampling] if i % 2 else mixed[i // 2 % 4]) for i in range(8)]
    together = finish(Session(model, num_slots=8, capacity=64), crowd)
    for place in (1, 5):
        alone = request(place, drafter(model, PLANS[plan], first=True), SAMPLINGS[sampling])
        (want,) = finish(Session(model, num_slots=1, capacity=64), [alone])
        assert together[place].tokens == want.tokens
        assert together[place].logprobs == want.logprobs
        if sampling != "penalised":  # a batch of greedy requests alone needs no laws, and drafts the same
            assert together[place].stats.num_draft_tokens == want.stats.num_draft_tokens


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(do_sample=True)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2)], ids=str)
def test_unsure_guesses_are_not_followed(
    models: Models, plain: Plain, sampling: Sampling, shape: tuple[int, ...]
) -> None:
    """The surer a guess has to be, the less is drafted; above certainty only the first guesses are left."""
    model, texts = models(torch.bfloat16), plain(torch.bfloat16)

    def drafted(confidence: float) -> float:
        own = drafter(model, DraftPlan(shape, min_confidence=confidence))
        requests = [Request(t.prompt, 12, own, sampling=sampling) for t in texts]
        results = finish(Session(model, num_slots=16, capacity=64), requests)
        steps = sum(sum(r.stats.drafted_per_position[:1]) for r in results)
        return sum(r.stats.num_draft_tokens for r in results) / steps

    always, sometimes, never = drafted(0.0), drafted(0.1), drafted(0.999999)
    assert always > sometimes > never == shape[0]


@pytest.mark.parametrize("plan", [DraftPlan((1, 1), min_confidence=0.2), DraftPlan((2, 2))], ids=["chain", "tree"])
def test_sampled_text_has_the_targets_law(models: Models, plan: DraftPlan) -> None:
    model = target(models)
    sampling = Sampling(do_sample=True, temperature=2.5, top_k=5, repetition_penalty=1.8, no_repeat_ngram_size=2)
    counts, kept = sampled_texts(model, sampling, drafter(model, plan, first=not plan.is_chain, gate=1))
    assert counts.shape == (V, V, V)
    assert chi_square(counts, exact(model, sampling)) > LIKELY
    assert 0.02 < kept < 0.98


@pytest.mark.parametrize(
    "fields", [{"widths": ()}, {"widths": (1, 0)}, {"widths": (5, 6)}, {"min_confidence": 1.0}, {"weights": "int9"}]
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DraftPlan(**fields)  # type: ignore[arg-type]

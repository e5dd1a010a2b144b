"""Sampled text has exactly the target's law, end to end: model, processors, drafting, verification, stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.decode.oracles import chi_square
from tests.decode.runs import finish
from tests.decode.scripted_drafters import Scripted
from tests.decode.tiny_decoders import build
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling, distribution
from vivace.core.seams import Context, Draft, Drafter
from vivace.core.step import Step
from vivace.decode.distributions import Distributions
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.multi_step import MultiStepPlain
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.kernels.choice import choose
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig
from vivace.methods.quantized.drafter import OwnGuess, QuantizedDrafter

Models = Callable[..., Decoder]
V = 7
PROMPT = (3, 1, 4, 1, 5, 3, 1)
LENGTH = 3
COUNT = 1024
FIRST_SEED = 100_000
LIKELY, CERTAIN = 0.01, 1e-6
SAMPLINGS = {
    "temperature": Sampling(do_sample=True, temperature=1.7),
    "truncated": Sampling(do_sample=True, temperature=2.0, top_k=5, top_p=0.9, min_p=0.05),
    "penalised": Sampling(do_sample=True, temperature=1.5, repetition_penalty=1.8, no_repeat_ngram_size=2),
}


TINY = {"width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_width": 64}


def target(models: Models) -> Decoder:
    return models(torch.bfloat16, vocab=V, num_layers=2, **TINY)


def other(models: Models, vocab: int = V) -> Decoder:
    return models(torch.bfloat16, vocab=vocab, seed=3, num_layers=1, **TINY)


@torch.inference_mode()
def exact(model: Decoder, sampling: Sampling, *, chunk: bool = True) -> Tensor:
    """The law of the next three tokens, (V, V, V), every prefix run by itself; ``chunk``: as the session reads it."""

    def after(new: tuple[int, ...]) -> Tensor:
        tokens = [*PROMPT, *new]
        cache = model.new_cache(1, 64)
        step = Step.of(Draft.committed_only({0: PROMPT[:-1]}), cache, chunk=chunk)
        model.run(model.embed(torch.tensor(PROMPT[:-1]), step), step)
        cache.commit([0], [range(len(PROMPT) - 1)])
        step = Step.of(Draft.committed_only({0: tokens[len(PROMPT) - 1 :]}), cache)
        hidden = model.run(model.embed(torch.tensor(tokens[len(PROMPT) - 1 :]), step), step)
        return distribution(model.head(hidden[-1:]), sampling, [tokens])[0].double()

    joint = torch.zeros(V, V, V, dtype=torch.float64)
    first = after(())
    for a in range(V):
        second = after((a,))
        for b in range(V):
            joint[a, b] = first[a] * second[b] * after((a, b))
    return joint


class SampledTree(Scripted):
    """Draws independent children from made-up laws: a tree of sampled guesses, often far from the target."""

    def __init__(self, widths: tuple[int, ...], *, sharpness: float = 4.0) -> None:
        super().__init__([], V)
        self.widths = widths
        self.scores = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * sharpness
        self.lies = False

    def propose(self, context: Context) -> Draft:
        draft, leaves = context.committed(), context.committed().last_committed()
        for depth, width in enumerate(self.widths):
            leaves = leaves[[context.max_nodes[int(draft.slot[row])] > depth for row in leaves]]
            if len(leaves) == 0:
                break
            scores = self.scores[draft.tokens[leaves]]
            q = context.distribution(scores, draft, leaves)
            drawn = [
                torch.multinomial(row, width, replacement=True, generator=context.generators[slot])
                for row, slot in zip(q, draft.slot[leaves].tolist(), strict=True)
            ]
            claimed = torch.softmax(scores, -1) if self.lies else q
            draft, leaves = draft.grow(leaves, torch.stack(drawn), claimed)
        return draft


def sampled_texts(
    model: Decoder, sampling: Sampling, drafter: Drafter, slots: int = 256, count: int = COUNT
) -> tuple[Tensor, float]:
    """Counts (V, V, V) over seeds, and the share of guesses that were kept."""
    session = Session(model, num_slots=slots, capacity=16)
    requests = [Request(PROMPT, LENGTH, drafter, sampling=sampling, seed=FIRST_SEED + i) for i in range(count)]
    results = finish(session, requests)
    counts = torch.zeros(V, V, V)
    for result in results:
        assert len(result.tokens) == LENGTH
        counts[result.tokens] += 1
    drafted = sum(r.stats.num_draft_tokens for r in results)
    return counts, sum(r.stats.num_accepted_draft_tokens for r in results) / max(drafted, 1)


def drafter(method: str, models: Models) -> Drafter:
    match method:
        case "plain":
            return NoDrafts()
        case "lookup":
            return PromptLookup(LookupConfig(num_draft_tokens=2, min_ngram=1))
        case "guessed tree":
            return Scripted([], V, shape=(3, 2))
        case "sampled tree":
            return SampledTree((2, 2))
        case "adversarial chain":
            return SampledTree((1, 1), sharpness=12.0)
        case "draft model":
            return DraftModel(other(models), V, DraftModelConfig(2))
        case _:
            return DraftModel(other(models, vocab=V - 2), V, DraftModelConfig(2))


CASES = [
    ("plain", "truncated"),
    ("lookup", "temperature"),
    ("guessed tree", "truncated"),
    ("sampled tree", "penalised"),
    ("adversarial chain", "temperature"),
    ("draft model", "penalised"),
    ("smaller vocabulary", "temperature"),
]


@pytest.mark.parametrize(("method", "sampling"), CASES)
def test_the_law_is_the_targets(models: Models, method: str, sampling: str) -> None:
    model = target(models)
    counts, kept = sampled_texts(model, SAMPLINGS[sampling], drafter(method, models))
    joint = exact(model, SAMPLINGS[sampling])
    assert float(joint.sum()) == pytest.approx(1.0, abs=1e-5)
    assert int((joint > 5 / COUNT).sum()) > 30, "the law has to be spread out for the test to see anything"
    assert chi_square(counts, joint) > LIKELY
    assert 0.02 < kept < 0.9 or method == "plain"


@pytest.fixture(scope="module")
def packed() -> Decoder:
    """A model for native kernels."""
    body = choose("auto").body
    if body is None:
        pytest.skip("no native kernels run here")
    model = build(torch.bfloat16, vocab=V, num_layers=2, **TINY).requires_grad_(False)
    pack_decoder(model, body)
    return model


def quantized(model: Decoder, length: int = 2) -> QuantizedDrafter:
    return QuantizedDrafter(model, OwnGuess(model), DraftPlan((1,) * length, weights="int8"))


HOT = Sampling(do_sample=True, temperature=1.7)


@pytest.mark.parametrize("steps", [0, 4])
def test_native_texts_of_a_seed_are_plain_decodings(packed: Decoder, steps: int) -> None:
    """Token for token with and without drafts, several steps in a call and one by one, behind any method."""
    asked = [Request(PROMPT, 20, NoDrafts(), sampling=HOT, seed=seed) for seed in range(4)]
    plain = [r.tokens for r in finish(Session(packed, num_slots=4, capacity=64), asked)]
    assert len(set(map(tuple, plain))) == 4
    for method in (MultiStepPlain(packed), PromptLookup(), quantized(packed)):
        for slots in (1, 4):
            session = Session(packed, num_slots=slots, capacity=64, steps_per_call=steps)
            assert [r.tokens for r in finish(session, [replace(each, drafter=method) for each in asked])] == plain


@pytest.mark.parametrize("slots", [1, 4])
def test_native_drafts_share_the_noise_of_verification(packed: Decoder, slots: int) -> None:
    """A draft by nearly the same model guesses what is drawn, however unlikely that is, also in a mixed batch."""
    drafter = quantized(packed, 4)
    hot = [Request(PROMPT, 40, drafter, sampling=HOT, seed=seed) for seed in range(4)]
    mixed = hot if slots == 1 else [*hot[:3], replace(hot[3], sampling=Sampling())]
    found = finish(Session(packed, num_slots=slots, capacity=64), mixed)
    assert min(r.stats.num_accepted_draft_tokens / r.stats.num_draft_tokens for r in found) > 0.75


@pytest.mark.parametrize("slots", [1, 256])
@pytest.mark.parametrize("top_p", [1.0, 0.85])
def test_the_law_of_native_draws_is_the_targets(packed: Decoder, top_p: float, slots: int) -> None:
    """With drafts that share the noise of verification: several steps in a call, and in a batch one by one."""
    model, drafter = packed, quantized(packed)
    sampling = Sampling(do_sample=True, temperature=1.7, top_p=top_p)
    counts, kept = sampled_texts(model, sampling, drafter, slots)
    assert chi_square(counts, exact(model, sampling, chunk=False)) > LIKELY
    assert 0.5 < kept < 1


def test_an_unfiltered_claim_is_caught(models: Models) -> None:
    """Drawn after the request's processors, said to be drawn before them."""
    model, liar = target(models), SampledTree((1, 1), sharpness=2.0)
    liar.lies = True
    counts, _ = sampled_texts(model, SAMPLINGS["penalised"], liar, count=1536)
    assert chi_square(counts, exact(model, SAMPLINGS["penalised"])) < CERTAIN


def test_a_prefix_without_the_path_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that see the committed text only, not the guesses above a row."""
    prefix = Distributions._prefix

    def short(self: Distributions, draft: Draft, slot: int, row: int) -> list[int]:
        return prefix(self, draft, slot, row)[: self._stored[slot] + 1]

    monkeypatch.setattr(Distributions, "_prefix", short)
    model = target(models)
    counts, _ = sampled_texts(model, SAMPLINGS["penalised"], drafter("draft model", models))
    assert chi_square(counts, exact(model, SAMPLINGS["penalised"])) < CERTAIN

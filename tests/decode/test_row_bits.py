"""A request gets the same tokens and the same log-probabilities, to the bit, alone and among sixteen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.decode.oracles import Text
from tests.decode.runs import Result, finish
from tests.decode.scripted_drafters import RIGHTNESS, Scripted
from tests.decode.tiny_decoders import VOCAB, prompts
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalised": Sampling(repetition_penalty=1.2, no_repeat_ngram_size=3),
    "sampled": Sampling(do_sample=True, temperature=0.8, top_p=0.9, top_k=40),
    "filtered": Sampling(do_sample=True, temperature=1.5, min_p=0.05, repetition_penalty=1.1),
}
MIXED = [SAMPLINGS[name] for name in ("greedy", "sampled", "penalised", "filtered")]
METHODS = ["plain", "lookup", "tree", "draft"]


def drafter(method: str, models: Models, plain: Plain, dtype: torch.dtype) -> Drafter:
    match method:
        case "plain":
            return NoDrafts()
        case "lookup":
            return PromptLookup(LookupConfig(num_draft_tokens=3, min_ngram=1))
        case "tree":
            known = [[*t.prompt, *t.new] for t in plain(dtype)]
            return Scripted(known, VOCAB, shape=(2, 1, 2), is_right=RIGHTNESS["sometimes"])
        case _:
            return DraftModel(models(dtype, seed=3, num_layers=1), VOCAB, DraftModelConfig(3))


def run(model: Decoder, requests: list[Request], every: int) -> list[Result]:
    return finish(Session(model, num_slots=16, capacity=64, chunk=8, prefill_budget=64), requests, every=every)


ALONE = {"penalised": "draft", "filtered": "tree"}
"""Methods with which batches of one kind are tried that are part of the mixed ones."""


@pytest.mark.slow_where(
    lambda dtype, method, sampling: (
        sampling != "mixed" and (dtype == torch.float32 or ALONE.get(sampling, method) != method)
    )
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "mixed"])
def test_alone_as_among_sixteen(models: Models, plain: Plain, dtype: torch.dtype, method: str, sampling: str) -> None:
    model = models(dtype)

    def request(place: int, method: Drafter) -> Request:
        how = MIXED[place % 4] if sampling == "mixed" else SAMPLINGS[sampling]
        return Request(prompts(16)[place], 6 + place % 5, method, sampling=how, seed=place, logprobs=place % 3 != 1)

    places = (0, 1, 6, 11)
    alone = {at: run(model, [request(at, drafter(method, models, plain, dtype))], 0)[0] for at in places}
    together = drafter(method, models, plain, dtype)
    crowd = run(model, [request(i, together) for i in range(16)], 0 if sampling == "mixed" else 1)
    for at, want in alone.items():
        assert crowd[at].tokens == want.tokens
        assert crowd[at].logprobs == want.logprobs
        assert len(want.logprobs) == (0 if at % 3 == 1 else len(want.tokens))


def test_bits_of_a_deep_text_beside_short_ones(models: Models, dtype: torch.dtype) -> None:
    """A neighbour many key blocks longer does not regroup a row's sums."""
    model = models(dtype)
    long, short = prompts(2, seed=11, longest=30)[1] * 30, prompts(2, seed=12)[1]

    def decode(tokens: list[tuple[int, ...]]) -> list[Result]:
        session = Session(model, num_slots=2, capacity=448)
        return finish(session, [Request(t, 8, NoDrafts(), logprobs=True) for t in tokens])

    assert len(long) > 150
    both = decode([long, short])
    for got, tokens in zip(both, (long, short), strict=True):
        (alone,) = decode([tokens])
        assert (got.tokens, got.logprobs) == (alone.tokens, alone.logprobs)


def test_different_seeds_differ(models: Models) -> None:
    sampling = SAMPLINGS["sampled"]
    requests = [Request((1, 2, 3), 12, NoDrafts(), sampling=sampling, seed=seed) for seed in (0, 0, 1)]
    first, again, other = run(models(torch.float32), requests, 0)
    assert first.tokens == again.tokens != other.tokens

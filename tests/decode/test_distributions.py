"""The law of a drafted position: transformers' processors, in its order, on the prefix the position would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from vivace.core.sampling import Sampling, distribution
from vivace.core.seams import Draft
from vivace.decode.distributions import Distributions
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.errors import ConfigError

V = 24


def processors(sampling: Sampling) -> LogitsProcessorList:
    """In the order ``generate`` puts them."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        found.append(theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        found.append(theirs.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.is_greedy:
        return found
    if sampling.temperature != 1.0:
        found.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        found.append(theirs.MinPLogitsWarper(sampling.min_p))
    return found


def expected(logits: Tensor, sampling: Sampling, prefixes: Sequence[Sequence[int]]) -> Tensor:
    found = processors(sampling)
    rows = [
        found(torch.tensor([list(p)]), row[None].clone())[0] if found else row
        for row, p in zip(logits, prefixes, strict=True)
    ]
    scores = torch.stack(rows)
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(scores.argmax(-1), V).float()
    return torch.softmax(scores, -1)


samplings = st.builds(
    Sampling,
    do_sample=st.booleans(),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 10, V, V + 5]),
    top_p=st.sampled_from([0.05, 0.3, 0.8, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.2, 3.0]),
    no_repeat_ngram_size=st.sampled_from([0, 1, 2, 3]),
)
prefixes = st.lists(st.integers(0, V // 3), min_size=1, max_size=14)


@given(samplings, st.lists(prefixes, min_size=1, max_size=4), st.integers(0, 10_000), st.floats(0.5, 6.0))
@settings(max_examples=200, deadline=None)
def test_the_law_is_transformers(sampling: Sampling, texts: list[list[int]], seed: int, spread: float) -> None:
    logits = torch.randn(len(texts), V, generator=torch.Generator().manual_seed(seed)) * spread
    before = logits.clone()
    got, want = distribution(logits, sampling, texts), expected(logits, sampling, texts)
    assert torch.equal(logits, before)
    # a sum that lands on the top-p edge may round either way: compare where the edge is clear
    if 0 < sampling.top_p < 1 and not sampling.is_greedy and edge_is_close(logits, sampling, texts):
        return
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(got > 0, want > 0)


def edge_is_close(logits: Tensor, sampling: Sampling, texts: Sequence[Sequence[int]]) -> bool:
    """Whether some cumulative probability is within rounding of top-p."""
    ordered = (
        distribution(logits, replace(sampling, top_p=1.0, min_p=0.0), texts).double().sort(-1, descending=True).values
    )
    return bool(((ordered.cumsum(-1) - sampling.top_p).abs() < 1e-5).any())


def test_each_processor_alone_changes_the_law() -> None:
    """So that the comparison above is about something."""
    logits, text = torch.randn(1, V, generator=torch.Generator().manual_seed(3)), [[1, 2, 3, 1, 2]]
    bare = distribution(logits, Sampling(do_sample=True), text)
    changes: list[dict[str, float]] = [
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 3},
    ]
    for change in changes:
        changed = distribution(logits, Sampling(do_sample=True, **change), text)  # type: ignore[arg-type]
        assert not torch.allclose(changed, bare)
        assert float(changed.sum()) == pytest.approx(1.0)


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        distribution(logits, Sampling(do_sample=True, temperature=0.0), [[0]] * 3),
        distribution(logits, Sampling(), [[0]] * 3),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("no_repeat_ngram_size", -1),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, found {value}"):
        Sampling(**{name: value})  # type: ignore[arg-type]


# Prefixes of drafted rows


def tree() -> Draft:
    """Slot 4: 9 -> (2, 3), 3 -> 5.  Slot 1: 8 -> 2 -> 2."""
    draft = Draft.committed_only({4: [9], 1: [8]})
    draft, first = draft.grow(torch.tensor([0]), torch.tensor([[2, 3]]))
    draft, _ = draft.grow(first[1:], torch.tensor([[5]]))
    draft, second = draft.grow(torch.tensor([1]), torch.tensor([[2]]))
    draft, _ = draft.grow(second, torch.tensor([[2]]))
    return draft


PATHS = {0: [9], 1: [8], 2: [9, 2], 3: [9, 3], 4: [9, 3, 5], 5: [8, 2], 6: [8, 2, 2]}


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6], [6, 4, 1], [3]], ids=str)
def test_a_row_is_judged_on_its_own_path(rows: list[int]) -> None:
    """Each request by its own processors, each row after the committed text and the guesses above it."""
    texts = {4: [1, 2, 9], 1: [2, 8, 2, 8]}
    samplings = {
        4: Sampling(do_sample=True, repetition_penalty=2.0, no_repeat_ngram_size=2),
        1: Sampling(do_sample=True, temperature=0.5, top_k=9, no_repeat_ngram_size=1),
    }
    requests = {s: Request(tuple(texts[s][:1]), 9, NoDrafts(), sampling=samplings[s]) for s in texts}
    stored = [0, 3, 0, 0, 2]
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(1)) * 3
    got = Distributions(requests, texts, stored)(logits, tree(), torch.tensor(rows))
    for place, row in enumerate(rows):
        slot = 4 if PATHS[row][0] == 9 else 1
        prefix = texts[slot][:-1] + PATHS[row]
        want = expected(logits[place : place + 1], samplings[slot], [prefix])[0]
        torch.testing.assert_close(got[place], want, atol=1e-6, rtol=1e-5)


def test_end_tokens_are_barred_by_the_length_of_the_path() -> None:
    texts = {4: [1, 2, 9], 1: [2, 8, 2, 8]}
    stop = StopRule(end_tokens=frozenset({0, 7}), min_new_tokens=4)
    requests = {s: Request(tuple(t[:1]), 9, NoDrafts(), stop=stop) for s, t in texts.items()}
    distributions = Distributions(requests, texts, [0, 3, 0, 0, 2])
    assert not distributions.is_greedy([4, 1])
    logits = torch.zeros(7, V)
    logits[:, 7] = 2.0
    logits[:, 3] = 1.0
    chosen = distributions(logits, tree(), torch.arange(7)).argmax(-1).tolist()
    # new tokens before the next one: slot 4 has 2 at its root, slot 1 has 3
    assert chosen == [3, 3, 3, 3, 7, 7, 7]


@pytest.mark.parametrize(
    ("change", "is_argmax"),
    [({}, True), ({"do_sample": True}, False), ({"repetition_penalty": 1.1}, False), ({"temperature": 0.0}, True)],
)
def test_argmax_is_enough_only_without_processors(change: dict[str, float], is_argmax: bool) -> None:
    plain = Request((1,), 1, NoDrafts())
    other = Request((1,), 1, NoDrafts(), sampling=Sampling(**change))  # type: ignore[arg-type]
    distributions = Distributions({0: plain, 1: other}, {0: [1], 1: [1]}, [0, 0])
    assert distributions.is_greedy([0])
    assert distributions.is_greedy([0, 1]) is is_argmax


def test_an_own_processor_sees_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores.masked_fill(torch.arange(V) % 2 == 0, -math.inf)

    own: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (processor,)
    request = Request((1,), 9, NoDrafts(), sampling=Sampling(do_sample=True), processors=own)
    distributions = Distributions({4: request, 1: request}, {4: [1, 2, 9], 1: [2, 8, 2, 8]}, [0, 3, 0, 0, 2])
    assert not distributions.is_greedy([4])
    got = distributions(torch.zeros(7, V), tree(), torch.arange(7))
    assert torch.equal(got[:, ::2], torch.zeros(7, V // 2))
    assert sorted(seen) == sorted([1, 2, *path] if path[0] == 9 else [2, 8, 2, *path] for path in PATHS.values())

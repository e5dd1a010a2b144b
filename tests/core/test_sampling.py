"""Probabilities at the ends of what may be asked for: always a distribution, and never a token that is not there."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vivace.core import sampling as drawing
from vivace.core.sampling import Sampling, distribution, drawable, sample
from vivace.errors import ConfigError, DecodingError, NoTokenError

V = 24
TINY, HUGE = 5e-324, 1.7e308
SMALLEST = (TINY, 1e-300, 1e-45, 1e-40, 1e-38, 1e-30, 1e-8)
ENDS = (*SMALLEST, 0.5, 1.0, 2.0, 1e8, 1e30, 1e38, 1e40, 1e300, HUGE)

extreme = st.builds(
    Sampling,
    do_sample=st.booleans(),
    temperature=st.sampled_from((0.0, *ENDS)),
    top_k=st.sampled_from([0, 1, 2, V, 10**30]),
    top_p=st.sampled_from([TINY, 1e-40, 1e-8, 0.5, 1 - 2**-53, 1.0]),
    min_p=st.sampled_from([0.0, TINY, 1e-40, 0.5, 1 - 2**-53, 1.0]),
    repetition_penalty=st.sampled_from(ENDS),
    no_repeat_ngram_size=st.sampled_from([0, 1, 2]),
)
scores = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, math.inf, -math.inf]),
)


@given(extreme, st.lists(scores, min_size=V, max_size=V), st.lists(st.integers(0, V - 1), max_size=6), st.booleans())
@example(Sampling(do_sample=True, temperature=1e-40), [float(i) for i in range(V)], [1], False)
@example(Sampling(do_sample=True, repetition_penalty=1e-300), [float(i) for i in range(V)], [0, 1], False)
@settings(max_examples=300, deadline=None)
def test_no_setting_leaves_the_simplex(asked: Sampling, row: list[float], prefix: list[int], bars_some: bool) -> None:
    barred = [(0, 3)] if bars_some else []
    logits = torch.tensor([row, [0.0, 1.0] * (V // 2)])
    found = distribution(logits, asked, [prefix, prefix], barred and [*barred, ()])
    assert bool((found >= 0).all())
    total = found.sum(-1).tolist()
    is_open = [
        bool(((line > -math.inf) & allowed(asked, prefix, bars_some and not i)).any()) for i, line in enumerate(logits)
    ]
    assert total == pytest.approx([float(one) for one in is_open], abs=1e-5)
    for line, opened in zip(found, is_open, strict=True):
        if opened:
            drawn = sample(line, torch.Generator().manual_seed(len(prefix)))
            assert 0 <= drawn < V
            assert line[drawn] > 0


def allowed(asked: Sampling, prefix: list[int], bars_some: bool) -> torch.Tensor:
    """Tokens that neither the length nor repeated n-grams exclude."""
    open_ = torch.ones(V, dtype=torch.bool)
    size = asked.no_repeat_ngram_size
    if size == 1 and prefix:
        open_[prefix] = False
    if size == 2:
        open_[[after for at, after in pairwise(prefix) if at == prefix[-1]]] = False
    if bars_some:
        open_[[0, 3]] = False
    return open_


@pytest.mark.parametrize("temperature", SMALLEST)
def test_the_coldest_temperatures_take_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5, -math.inf], [-math.inf, -9.0, -9.0, -80.0]])
    found = distribution(logits, Sampling(do_sample=True, temperature=temperature), [[], []])
    assert found.tolist() == [[0, 1, 0, 0], [0, 0.5, 0.5, 0]]


@pytest.mark.parametrize("digits", [309, 5000])
def test_a_temperature_beyond_all_floats_is_refused(digits: int) -> None:
    with pytest.raises(ConfigError, match=r"temperature must be at most 1\.8e\+308"):
        Sampling(do_sample=True, temperature=10**digits)


@pytest.mark.parametrize("temperature", [1e30, 1e300, HUGE])
def test_the_hottest_temperatures_are_uniform_over_what_is_allowed(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5, -math.inf, -7.0]])
    found = distribution(logits, Sampling(do_sample=True, temperature=temperature), [[]])
    assert found.tolist() == [[0.25, 0.25, 0.25, 0, 0.25]]


@pytest.mark.parametrize(("penalty", "likeliest"), [(1e-300, 0), (TINY, 0), (1e300, 2), (HUGE, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-40])
def test_the_strongest_penalties_put_seen_tokens_first_or_last(
    penalty: float, likeliest: int, temperature: float
) -> None:
    logits = torch.tensor([[2.0, -3.0, 1.0, 4.0, -math.inf]])
    found = distribution(
        logits, Sampling(do_sample=True, temperature=temperature, repetition_penalty=penalty), [[0, 1, 3, 4]]
    )
    if penalty > 1:  # 0 and 3 fall to nearly zero, 1 below everything: 2 alone is left where it was
        assert int(found.argmax()) == likeliest
    else:  # 0 and 3 rise to the highest score that there is
        assert found[0, [0, 3]].sum() == 1
    assert found[0, 4] == 0, "what is excluded stays so"


def test_scores_that_a_penalty_pushes_down_are_not_excluded() -> None:
    logits = torch.tensor([[-20.0, -30.0], [-math.inf, -30.0], [-math.inf, -math.inf]])
    found = distribution(logits, Sampling(do_sample=True, repetition_penalty=1e300), [[0, 1]] * 3)
    assert found.sum(-1).tolist() == [1, 1, 0], "and what is excluded is not let in again"


def test_infinite_scores_come_first() -> None:
    """A processor that forces a token may say so with infinity."""
    logits = torch.tensor([[2.0, math.inf, 1.0, math.inf]])
    assert distribution(logits, Sampling(do_sample=True), [[]]).tolist() == [[0, 0.5, 0, 0.5]]
    assert distribution(logits, Sampling(), [[]]).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(
    "asked", [Sampling(), Sampling(do_sample=True), Sampling(do_sample=True, top_p=0.5, min_p=0.1)]
)
def test_where_every_token_is_excluded_there_is_no_mass(asked: Sampling) -> None:
    logits = torch.tensor([[-math.inf] * 4, [0.0, 1.0, -math.inf, 0.0]])
    assert distribution(logits, asked, [[], []])[0].tolist() == [0] * 4
    assert float(distribution(logits, asked, [[], []])[1].sum()) == pytest.approx(1)
    everything = distribution(torch.zeros(1, 4), asked, [[]], [(0, 1, 2, 3)])
    assert everything.tolist() == [[0] * 4]
    with pytest.raises(NoTokenError):
        sample(everything[0], torch.Generator())


@pytest.mark.parametrize("asked", [Sampling(), Sampling(do_sample=True)])
def test_scores_that_are_no_numbers_are_told(asked: Sampling) -> None:
    found = distribution(torch.tensor([[1.0, math.nan, 2.0]]), asked, [[]])
    with pytest.raises(DecodingError, match="not numbers"):
        sample(found[0], torch.Generator())


def test_the_largest_random_number_draws_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may carry it to the very end of the cumulative sum, where no token is."""
    monkeypatch.setattr(drawing, "uniform", lambda _: 1 - 2**-53)
    probs = torch.tensor([0.5, 0.5 + 2**-23, 0.0])
    assert sample(probs, torch.Generator()) == 1
    for total in range(1, 400):
        weights = torch.zeros(5)
        weights[:3] = torch.tensor([0.3, 0.3, 0.4]) * total
        assert sample(weights, torch.Generator()) == 2


def test_rows_without_mass_become_guesses_of_something() -> None:
    probs = torch.tensor([[0.0, 0.0], [0.25, 0.75], [math.nan, 0.5]])
    assert drawable(probs).tolist() == [[1, 0], [0.25, 0.75], [1, 0]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Rescaling one row leaves the others' bits alone."""
    asked = Sampling(do_sample=True, temperature=0.7)
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 5
    alone = distribution(logits[:1], asked, [[]])
    logits[1] *= 1e39
    logits[2] = -math.inf
    assert torch.equal(distribution(logits, asked, [[]] * 3)[:1], alone)


@given(st.floats(0.05, 10), st.floats(0.2, 5), st.integers(0, 1000))
def test_ordinary_settings_keep_their_bits(temperature: float, penalty: float, seed: int) -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(seed)) * 8
    asked = Sampling(do_sample=True, temperature=temperature, repetition_penalty=penalty)
    want = logits.clone()
    seen = torch.tensor([1, 4])
    score = want[:, seen]
    want[:, seen] = torch.where(score < 0, score * penalty, score / penalty)
    assert torch.equal(distribution(logits, asked, [[1, 4]] * 2), torch.softmax(want / temperature, -1))
    bare = distribution(logits, replace(asked, repetition_penalty=1.0), [[]] * 2)
    assert torch.equal(bare, torch.softmax(logits / temperature, -1))

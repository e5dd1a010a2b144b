"""How many tokens go on, and which."""

from __future__ import annotations

import pytest
import torch

from vivace.prefill.schedule import PRESETS, PrunePoint, Schedule, parse_keep, scaled
from vivace.prefill.scores import QUESTION, at_random, by_attention, by_words


@pytest.mark.parametrize(("num_layers", "layers"), [(32, [10, 19, 28]), (30, [9, 18, 26]), (2, [1]), (4, [1, 2, 3])])
def test_presets_are_scaled_to_the_depth(num_layers: int, layers: list[int]) -> None:
    for preset, shares in PRESETS.items():
        points = scaled(preset, num_layers).points
        assert [point.layer for point in points] == layers
        assert points[0].keep == shares[0]


def test_counts_and_shares() -> None:
    schedule = parse_keep("9:0.5,18:0.5,26:0.5", 30)
    assert schedule.points == (PrunePoint(9, 0.5), PrunePoint(18, 0.5), PrunePoint(26, 0.5))
    assert schedule.counts(3376) == (3376, 1688, 844, 422)
    assert schedule.counts(3) == (3, 2, 1, 1)
    assert schedule.share(3376, 30) == pytest.approx((3375 * 9 + 1687 * 9 + 843 * 8 + 421 * 4) / (3375 * 30))
    assert Schedule(()).share(99, 30) == 1
    assert Schedule((PrunePoint(1, 0.7),)).counts(10) == (10, 7), "and not 8, whatever 0.7 * 10 is"


def test_ties_go_to_earlier_tokens_and_the_last_one_stays() -> None:
    weights = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.0], [0.1, 0.1, 0.1, 0.1, 0.1, 0.5]])
    assert by_attention(weights, 4).tolist() == [0, 1, 3, 5]
    assert by_attention(weights, 1).tolist() == [5]
    assert by_attention(weights, 6).tolist() == list(range(6))


@pytest.mark.parametrize("count", [1, 2, 50, 64, 65, 200, 299, 300])
def test_as_many_as_asked_for(count: int) -> None:
    tokens = [place * 7 % 50 for place in range(300)]
    for choose in (at_random, by_words):
        kept = choose(tokens, count).tolist()
        assert len(set(kept)) == count
        assert kept == sorted(kept)
        assert kept[-1] == 299
        assert kept == choose(tokens, count).tolist()


def test_words_of_the_end_decide() -> None:
    tokens = [place % 9 for place in range(320)]
    tokens[96:128] = [99] * 32
    tokens[-1] = 99
    assert set(range(96, 128)) <= set(by_words(tokens, QUESTION + 32).tolist())

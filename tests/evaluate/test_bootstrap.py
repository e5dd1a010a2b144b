from __future__ import annotations

import numpy as np
import pytest

from vivace.errors import ConfigError
from vivace.evaluate import bootstrap
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums


def test_pairing_cancels_what_both_systems_share() -> None:
    rng = np.random.default_rng(1)
    hard = rng.normal(0, 10, 200)
    interval = paired_bootstrap(list(hard + 1), list(hard))
    assert interval.estimate == pytest.approx(1)
    assert interval.high - interval.low < 1e-9


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(200):
        a, b = rng.normal(0.3, 1, 60), rng.normal(0, 1, 60)
        interval = paired_bootstrap(list(a), list(b), confidence=0.9, num_resamples=400, seed=seed)
        hits += interval.low <= 0.3 <= interval.high
    assert 0.83 <= hits / 200 <= 0.96


def test_ratio_is_of_sums_and_seeded() -> None:
    interval = paired_bootstrap([2.0, 6.0], [1.0, 1.0], statistic=ratio_of_sums, seed=3)
    assert interval.estimate == 4.0
    assert (interval.low, interval.high) == (2.0, 6.0)
    assert interval == paired_bootstrap([2.0, 6.0], [1.0, 1.0], statistic=ratio_of_sums, seed=3)
    assert str(interval) == "4 [2, 6]"


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="found 2 and 1"):
        paired_bootstrap([1, 2], [1])
    with pytest.raises(ConfigError, match="found 0 and 0"):
        paired_bootstrap([], [])
    with pytest.raises(ConfigError, match=r"between 0 and 1, found 95"):
        paired_bootstrap([1], [1], confidence=95)


def test_draws_in_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that thousands of prompts need no more memory than hundreds."""
    rng = np.random.default_rng(4)
    a, b = list(rng.normal(0.3, 1, 37)), list(rng.normal(0, 1, 37))
    whole = paired_bootstrap(a, b, num_resamples=100)
    for at_once in (37, 3 * 37, 1):
        monkeypatch.setattr(bootstrap, "DRAWN_AT_ONCE", at_once)
        assert paired_bootstrap(a, b, num_resamples=100) == whole

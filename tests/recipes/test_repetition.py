"""Where a text has begun to repeat itself."""

from __future__ import annotations

import random

import pytest

from vivace.recipes.repetition import WINDOW, Repetition


def found_after(tokens: list[int]) -> int | None:
    """Return the number of tokens after which a repetition is found."""
    text = Repetition()
    for count, token in enumerate(tokens, 1):
        text.read([token])
        if text.is_found:
            return count
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_a_loop_is_found_within_a_window_of_its_second_round(period: int) -> None:
    begun = list(range(100, 120))
    found = found_after([*begun, *(list(range(period)) * 100)])
    assert found is not None
    assert len(begun) + period + WINDOW // 2 < found <= len(begun) + period + 3 + WINDOW


def test_a_loop_that_counts_is_found_and_other_text_is_none() -> None:
    counted = [token for number in range(40) for token in (1, 500 + number, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)]
    assert found_after(counted) is None  # the number and the three tokens behind it are new in each round
    longer = [token for number in range(40) for token in (500 + number, *range(60))]
    assert found_after(longer) is not None
    rng = random.Random(0)
    assert found_after([rng.randrange(50) for _ in range(2000)]) is None


def test_the_same_is_found_whatever_comes_together() -> None:
    text = Repetition()
    text.read([1, 2, 3, 4] * 4)
    assert not text.is_found
    text.read([1, 2, 3, 4] * 8)
    assert text.is_found

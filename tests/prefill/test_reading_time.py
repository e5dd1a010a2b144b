"""Times of readings are predicted from those of full ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

import vivace
from vivace.cli.first_token import measure_first_tokens
from vivace.prefill.reading_time import ReadingTime, pruned_time
from vivace.prefill.schedule import Schedule, parse_keep

TIME = ReadingTime(by_token=3e-4, by_square=9e-8)


@given(some.floats(1e-6, 1e-2), some.floats(0, 1e-6), some.sets(some.integers(50, 9000), min_size=2, max_size=5))
def test_two_lengths_or_more_give_the_law(by_token: float, by_square: float, lengths: set[int]) -> None:
    law = ReadingTime(by_token, by_square)
    fit = ReadingTime.fit({length: law.full(length) for length in lengths})
    assert fit is not None
    for length in (*lengths, 3000):
        assert fit.full(length) == pytest.approx(law.full(length), rel=1e-3)


def test_one_length_gives_none() -> None:
    assert ReadingTime.fit({1000: 0.4}) is None


def test_the_fit_is_relative() -> None:
    """A short reading that is a tenth too slow counts as much as a long one that is a tenth too fast."""
    fit = ReadingTime.fit({100: 1.1 * TIME.full(100), 200: TIME.full(200), 8000: 0.9 * TIME.full(8000)})
    assert fit is not None
    assert fit.full(100) > TIME.full(100)
    assert fit.full(8000) == pytest.approx(0.9 * TIME.full(8000), rel=0.01)


def test_a_part_is_a_full_reading_of_what_is_left_in_its_layers() -> None:
    schedule = parse_keep("9:0.5,18:0.5", 30)
    by_hand = 0.3 * TIME.full(4000) + 0.3 * TIME.full(2000) + 0.4 * TIME.full(1000)
    assert pruned_time(TIME.full, schedule, 4000, 30) == pytest.approx(by_hand)
    assert pruned_time(TIME.full, Schedule(()), 4000, 30) == TIME.full(4000)


def test_what_is_read_again_is_read_from_the_first_layer() -> None:
    again = Schedule(parse_keep("12:0.3", 30).points, reads_again=True)
    assert pruned_time(TIME.full, again, 4000, 30) == pytest.approx(0.4 * TIME.full(4000) + TIME.full(1200))


def test_the_share_of_the_square() -> None:
    assert TIME.square_share(4000) == pytest.approx(9e-8 * 4000 / (3e-4 + 9e-8 * 4000))


def test_a_schedule_takes_what_full_readings_of_its_parts_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = vivace.load(folder), list[tuple[int, str]]()

    def generate(prompt: list[int], **options: Any) -> list[Any]:
        asked.append((len(prompt), options["prefill"]))
        stats = SimpleNamespace(
            first_token_s=1e-3 * len(prompt) ** 2, decode_s=0.1, tokens_per_s=10.0, num_prompt_layer_passes=7
        )
        return [SimpleNamespace(stats=stats)]

    monkeypatch.setattr(engine, "generate", generate)
    rows, _ = measure_first_tokens(engine, ["abc " * 30], [100], ["full", "lazy"], "1:0.3", 2)
    found = {row.prefill: row.predicted_s for row in rows}
    layers = engine.model.config.num_layers
    assert found["full"] == pytest.approx(10.0)
    assert found["lazy"] == pytest.approx((10.0 + 0.9 * (layers - 1)) / layers)
    assert asked.count((30, "full")) == 3, "once untimed, twice timed"

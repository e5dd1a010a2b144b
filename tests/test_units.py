from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.errors import ConfigError
from vivace.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512 MB", 512_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("1.5KiB", 1536),
        ("0", 0),
        (".5kB", 500),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4 gigs", "4GiB!", "1e3", "4gib"])
def test_anything_else_is_refused_and_named(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 300 + "TB", 10**400, str(1 << 63), "8388608TiB"])
def test_more_than_any_machine_has_is_one_short_line(text: str | int) -> None:
    with pytest.raises(ConfigError, match="expected a size") as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.integers(0, 1 << 50))
def test_formatted_size_is_close_to_the_size(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.5e-4, "850 µs"), (0.02, "20.0 ms"), (1.5, "1.50 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_formatted_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

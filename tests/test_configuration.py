"""Mappings become frozen dataclasses, and what does not fit is named by its path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from vivace.configuration import build
from vivace.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    width: int = 3
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner = field(default_factory=Inner)
    sizes: tuple[int, ...] = ()
    limit: int | None = None


def test_values_become_dataclasses() -> None:
    made = build(Outer, {"kind": "b", "inner": {"rate": 1}, "sizes": [1, 2], "limit": None})
    assert made == Outer("b", Inner(rate=1.0), (1, 2), None)
    assert isinstance(made.inner.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "b", "iner": {}}, "unknown key iner; did you mean 'inner'"),
        ({"kind": "b", "inner": {"widht": 1}}, "unknown key inner.widht; did you mean 'width'"),
        ({}, "needs kind"),
        ({"kind": "c"}, "kind must be one of a, b, found 'c'"),
        ({"kind": "a", "inner": {"width": "wide"}}, "inner.width must be int, found 'wide'"),
        ({"kind": "a", "inner": {"width": True}}, "inner.width must be int, found True"),
        ({"kind": "a", "sizes": [1, "x"]}, r"sizes\[1\] must be int, found 'x'"),
        ({"kind": "a", "limit": 1.5}, "limit must be int, found 1.5"),
    ],
)
def test_wrong_values_are_named_by_their_path(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, values)

"""Mappings become frozen dataclasses, and what does not fit is named by its path."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from vivace.configuration import build
from vivace.errors import ConfigError
from vivace.methods.table import METHODS
from vivace.recipes.reading import override
from vivace.train.config import LoopConfig
from vivace.train.optim import OptimiserConfig


@dataclass(frozen=True)
class Inner:
    RENAMED: ClassVar[Mapping[str, str]] = {"size": "width", "speed": "rate"}
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
        ({"kind": "a", 1: 2}, "unknown key 1; choose from inner, kind, limit, sizes"),
        ({"kind": "a", "inner": [1]}, r"inner must be Inner, found \[1\]"),
        ([], r"a configuration must be a mapping, found \[\]"),
        (None, "a configuration must be a mapping, found None"),
        ("kind", "a configuration must be a mapping, found 'kind'"),
    ],
)
def test_wrong_values_are_named_by_their_path(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, values)


def test_old_names_are_read_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert build(Outer, {"kind": "a", "inner": {"size": 4}}).inner == Inner(4)
    assert [record.message for record in caplog.records] == [
        "inner.size is called inner.width now; the old name is read until version 0.3"
    ]


@pytest.mark.parametrize("values", [{"rate": 0.1, "speed": 0.2}, {"speed": 0.1, "rate": 0.2}])
def test_of_an_old_and_a_new_name_the_later_counts(values: dict[str, float]) -> None:
    assert build(Inner, values).rate == 0.2


@pytest.mark.parametrize("method", METHODS)
def test_renamed_fields_exist(method: str) -> None:
    """Configs and plans of methods, whose files may have old keys, map them to fields that they have."""
    describe = METHODS[method].stored
    kinds: list[Any] = [] if describe is None else [describe().config, describe().plan]
    for kind in kinds:
        renamed = getattr(kind, "RENAMED", {})
        assert set(renamed.values()) <= set(getattr(kind, "__dataclass_fields__", ()))
        assert not set(renamed) & set(getattr(kind, "__dataclass_fields__", ()))


def test_numbers_are_read_as_they_are_usually_written() -> None:
    """A rate such as 1e-3, which has no point, is a text to YAML."""
    assert build(Inner, override({}, ["rate=1e-3"])) == Inner(rate=1e-3)
    for text in (".nan", "nan", "fast"):
        with pytest.raises(ConfigError, match=r"rate (is not a number|must be float)"):
            build(Inner, override({}, [f"rate={text}"]))
    for wrong in ({"minutes": 1.0, "snapshot_s": -1.0}, {"minutes": 1.0, "clip": float("nan")}):
        with pytest.raises(ConfigError, match=r"snapshot_s must be at least 0|clip is not a number"):
            build(LoopConfig, wrong)
    with pytest.raises(ConfigError, match="weight_decay must be at least 0"):
        OptimiserConfig(weight_decay=-5.0)

"""Ways to share a model, measured in turns: none of them changes what another one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.parallel.test_partition_table import COSTS
from vivace.evaluate.ways import GRID, Ways
from vivace.parallel.partition import balanced
from vivace.parallel.runahead import RunaheadPrefill


@pytest.mark.parametrize("names", [("runahead", "runahead-model"), ("runahead-model", "runahead", "runahead-model")])
def test_pieces_of_the_model_are_not_those_that_a_search_tried_last(names: tuple[str, ...]) -> None:
    world: Any = SimpleNamespace(size=3)
    reading = RunaheadPrefill(world)
    reading.costs = COSTS
    read: list[Any] = []
    engine: Any = SimpleNamespace(model=None, generate=lambda *_, **__: read.append(reading.fixed))
    loading: Any = SimpleNamespace(world=world, reading=reading)
    ways = Ways(loading, [engine] * 4, names, searched=4)
    pieces = [(name, ways._pieces(name, range(4097))) for name in names]
    expected = balanced(4096, 3, GRID, COSTS)
    assert list(read[0]) == expected, "a search begins with the pieces of the model"
    assert len(read) == 4
    assert list(read[-1]) != expected
    assert [counts for name, counts in pieces if name == "runahead-model"] == [expected] * names.count("runahead-model")

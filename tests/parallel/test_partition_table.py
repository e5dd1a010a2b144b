"""Searched boundaries: what is stored comes back, and a table of something else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_config
from vivace.errors import CorruptError, MismatchError
from vivace.parallel.partition import Costs, alone_s, balanced, even, first_token_s, gathered_s
from vivace.parallel.partition_table import PartitionEntry, Table, entries_before, read_table, save_table, search
from vivace.parallel.prediction import prompt_times
from vivace.parallel.runahead import RunaheadPrefill

COSTS = Costs(project_s=1e-6, feed_s=9e-6, attend_s=2e-8, num_layers=6, latency_s=1e-4, entry_s=2e-7)
TABLE = Table((PartitionEntry(1024, (640, 384), 1.0, 1.1), PartitionEntry(4096, (2816, 1280), 5.0, 6.0)))
FACTS = {"ranks": 2, "dtype": "float32", "kernels": "torch", "threads": 1}


def test_stored_lengths_come_back_and_others_lie_between() -> None:
    assert TABLE.counts(1024, 128, 2) == [640, 384]
    assert TABLE.counts(4096, 128, 2) == [2816, 1280]
    shares = [(TABLE.counts(length, 16, 2) or [0])[0] / length for length in range(1040, 4096, 64)]
    assert all(640 / 1024 - 0.01 <= share <= 2816 / 4096 + 0.01 for share in shares)
    assert shares == pytest.approx(sorted(shares), abs=0.012)
    for length in (300, 777, 2000, 3999, 9000):
        counts = TABLE.counts(length, 128, 2) or []
        assert sum(counts) == length
        assert min(counts) > 0
        assert counts[0] % 128 == 0


def test_only_entries_of_as_many_pieces_are_neighbours() -> None:
    short = PartitionEntry(299, (256, 43), 1.0, 1.1)
    table = Table(
        (short, PartitionEntry(2047, (768, 512, 767), 3.0, 3.1), PartitionEntry(4095, (1536, 1024, 1535), 6.0, 7.0))
    )
    assert table.counts(299, 256, 2) == [256, 43]
    for length in (900, 1000, 3000, 9000):
        assert len(table.counts(length, 256, 3) or []) == 3
    assert table.counts(9000, 256, 4) is None


def test_a_table_of_short_prompts_leaves_long_ones_to_the_model(tmp_path: Path) -> None:
    """Else two of three ranks would read them, and the third would do nothing."""
    model: Any = SimpleNamespace(config=load_config(make_checkpoint(tmp_path / "m")))
    world: Any = SimpleNamespace(size=3)
    prefill = RunaheadPrefill(world, table=Table((PartitionEntry(299, (256, 43), 1.0, 1.1),)))
    prefill.costs = COSTS
    assert prefill.counts(model, 299, 256) == [256, 43]
    assert prefill.counts(model, 4096, 256) == balanced(4096, 3, 256, COSTS)


def test_a_search_ends_at_what_is_fastest_and_times_nothing_twice() -> None:
    asked: list[tuple[int, ...]] = []

    def seconds(counts: tuple[int, ...]) -> float:
        asked.append(counts)
        return first_token_s(counts, COSTS)

    found, found_s = search(even(8192, 2, 256), 256, seconds, most=40)
    best = min(first_token_s((at, 8192 - at), COSTS) for at in range(256, 8192, 256))
    assert found_s <= best * 1.006
    assert found_s == first_token_s(found, COSTS)
    assert len(set(asked)) == len(asked)
    assert len(search([4096, 4096], 256, lambda counts: 1.0, most=5)[0]) == 2


def test_a_table_survives_the_disk_and_is_refused_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "runahead-2"
    save_table(folder, "abc", FACTS, TABLE)
    assert read_table(folder, "abc", FACTS) == TABLE
    with pytest.raises(MismatchError, match="trained on base"):
        read_table(folder, "abd", FACTS)
    for name, value in (("ranks", 3), ("dtype", "bfloat16"), ("kernels", "avx2"), ("threads", 2)):
        with pytest.raises(MismatchError, match=f"is for {name} .*vivace tune runahead"):
            read_table(folder, "abc", {**FACTS, name: value})
    written = json.loads((folder / "config.json").read_text())
    written["config"]["entries"][0][1] = [1, 2]
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(CorruptError, match="no usable table of partitions"):
        read_table(folder, "abc", FACTS)


def test_a_later_search_keeps_the_lengths_before(tmp_path: Path) -> None:
    """Those that it has not searched itself, and none of a table that is of something else or damaged."""
    folder, again = tmp_path / "runahead-2", [PartitionEntry(4096, (2048, 2048), 4.0, 4.0)]
    assert entries_before(folder, "abc", FACTS, again) == []
    save_table(folder, "abc", FACTS, TABLE)
    assert entries_before(folder, "abc", FACTS, again) == [TABLE.entries[0]]
    assert entries_before(folder, "abc", FACTS, []) == list(TABLE.entries)
    assert entries_before(folder, "abc", {**FACTS, "threads": 2}, again) == []
    assert entries_before(folder, "abd", FACTS, again) == []
    (folder / "config.json").write_text("{")
    assert entries_before(folder, "abc", FACTS, again) == []


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        [[float("inf"), [640, 384], 1.0, 1.1]],
        [[1024, [640, 384], float("nan"), 1.1]],
        [[1024, [640, 384], 1.0, -1.0]],
        [[0, [], 1.0, 1.1]],
        [[1024.9, [640.7, 384.2], 1.0, 1.1]],
        [[1024, [1280, -256], 1.0, 1.1]],
        [[1024, [256, 256, 512], 1.0, 1.1]],
        {"1024": [640, 384]},
    ],
)
def test_a_damaged_table_is_refused_by_name(entries: object, tmp_path: Path) -> None:
    """Among them are three pieces for two ranks, for which the second would wait without end."""
    folder = tmp_path / "runahead-2"
    save_table(folder, "abc", FACTS, TABLE)
    written = json.loads((folder / "config.json").read_text())
    written["config"]["entries"] = entries
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(CorruptError, match=r"runahead-2 .*search again: vivace tune runahead"):
        read_table(folder, "abc", FACTS)


def test_of_two_entries_of_one_length_the_faster_counts(tmp_path: Path) -> None:
    """Tables of the past have them, where two lengths that were asked for were both above the context."""
    slow, fast = PartitionEntry(1024, (512, 512), 2.0, 2.0), PartitionEntry(1024, (768, 256), 1.0, 2.0)
    save_table(tmp_path / "t", "abc", FACTS, Table((fast, slow)))
    assert read_table(tmp_path / "t", "abc", FACTS) == Table((fast,))


def test_pieces_of_a_table_begin_on_the_grid_of_whoever_reads() -> None:
    """Else keys and values would have other bits than those of one process."""
    table = Table((PartitionEntry(1024, (300, 724), 1.0, 1.1),))
    assert table.counts(1024, 256, 2) == [256, 768]
    assert TABLE.counts(1024, 512, 2) == [512, 512]


def test_models_of_ways_agree_where_they_must() -> None:
    free = Costs(1e-6, 9e-6, 2e-8, 6)
    alone = alone_s(8192, free)
    assert alone == pytest.approx(first_token_s([8192], free) + free.feed_s * 8192 + free.attend_s * 8192**2 / 2)
    halves = even(8192, 2, 256)
    assert gathered_s(halves, free, is_dense=True) > gathered_s(halves, free, is_dense=False)
    slow = Costs(1e-6, 9e-6, 2e-8, 6, latency_s=1.0, entry_s=1e-3, row_bytes_s=1e-3)
    predicted = prompt_times(8192, halves, halves, slow, slow, 2)
    assert min(predicted, key=lambda way: predicted[way]) == "one", "on a hopeless link nothing is shared"
    fast = prompt_times(8192, halves, halves, free, free, 2)
    assert fast["runahead"] < fast["one"]

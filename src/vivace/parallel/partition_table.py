"""Boundaries that were searched by timing this machine, for some lengths, and predictions between them (KV-Runahead).

For an unseen length the fractions of the two neighbouring lengths are interpolated (Cho et al. 2024, section on KVR-P);
below the table its first fractions are taken, above it its last ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from vivace.checkpoint.adapters import load_adapter, save_adapter
from vivace.errors import CheckpointError, CorruptError, MismatchError
from vivace.parallel.partition import on_grid

KIND = "runahead"
GAIN = 0.995
"""A partition is better if it takes less than this share of the best one's time."""


@dataclass(frozen=True)
class PartitionEntry:
    """The best pieces that were found for one length."""

    length: int
    counts: tuple[int, ...]
    seconds: float
    even_s: float


@dataclass(frozen=True)
class Table:
    """Entries in the order of their lengths."""

    entries: tuple[PartitionEntry, ...]

    def counts(self, length: int, grid: int, num_pieces: int) -> list[int] | None:
        """Return the pieces of a prompt: those of the table, or between those of its neighbours, on the grid.

        Only entries of ``num_pieces`` pieces count; None where there is none. A table of short prompts alone has fewer
        pieces than ranks, and says nothing of prompts that all of them read.
        """
        entries = [entry for entry in self.entries if len(entry.counts) == num_pieces]
        if not entries:
            return None
        place = bisect_left([entry.length for entry in entries], length)
        low, high = entries[max(0, place - 1)], entries[min(place, len(entries) - 1)]
        share = 0.0 if low is high else (length - low.length) / (high.length - low.length)
        bounds = [
            length * ((1 - share) * before / low.length + share * behind / high.length)
            for before, behind in zip(_bounds(low), _bounds(high), strict=True)
        ]
        return on_grid(bounds, length, grid)


def _bounds(entry: PartitionEntry) -> list[int]:
    return list(accumulate(entry.counts))[:-1]


def search(
    start: Sequence[int], grid: int, measure: Callable[[tuple[int, ...]], float], most: int = 12
) -> tuple[list[int], float]:
    """Return the fastest pieces that are found by moving boundaries, and their time.

    One boundary moves at a time, by strides that are halved down to the grid; no pieces are timed twice.

    Args:
        start: pieces to begin with.
        grid: boundaries lie on its multiples.
        measure: returns the seconds that some pieces take.
        most: most pieces that are timed.
    """
    timed: dict[tuple[int, ...], float] = {}

    def seconds(counts: tuple[int, ...]) -> float:
        if counts not in timed:
            timed[counts] = measure(counts)
        return timed[counts]

    best = tuple(start)
    best_s = seconds(best)
    stride = max(grid, sum(start) // (8 * len(start)) // grid * grid)
    while stride >= grid and len(timed) < most:
        improved = False
        for place in range(len(start) - 1):
            for step in (-stride, stride):
                moved = list(best)
                moved[place] += step
                moved[place + 1] -= step
                if min(moved) <= 0 or len(timed) >= most:
                    continue
                moved_s = seconds(tuple(moved))
                if moved_s < best_s * GAIN:
                    best, best_s, improved = tuple(moved), moved_s, True
        if not improved:
            stride = stride // 2 // grid * grid
    return list(best), best_s


def save_table(folder: Path, base: str, facts: Mapping[str, Any], table: Table) -> None:
    """Write a table as an adapter folder; ``facts`` are what it is valid for."""
    rows = [[entry.length, list(entry.counts), entry.seconds, entry.even_s] for entry in table.entries]
    save_adapter(folder, KIND, base, {}, {**facts, "entries": rows}, {})


def read_table(folder: Path, base: str, facts: Mapping[str, Any]) -> Table:
    """Read a table.

    Raises:
        NotFoundError: there is none.
        MismatchError: it is of another checkpoint, or of other facts, which the message names.
        CorruptError: it is damaged.
    """
    written = load_adapter(folder, base)[0]
    if written["kind"] != KIND:
        raise MismatchError(f"{folder} is an adapter for {written['kind']!r}, not a table of partitions ({KIND})")
    config = written["config"]
    for name, value in facts.items():
        if config.get(name) != value:
            raise MismatchError(
                f"the table {folder} is for {name} {config.get(name)}, this is {name} {value}; search again: "
                "vivace tune runahead"
            )
    rows = config.get("entries")
    entries = [_entry_of(row, facts["ranks"]) for row in rows] if isinstance(rows, list) else []
    found = [entry for entry in entries if entry is not None]
    if not found or len(found) < len(entries):
        raise CorruptError(
            f"{folder} holds no usable table of partitions (a row is damaged, or has more pieces than there are "
            "ranks); search again: vivace tune runahead"
        )
    fastest = {entry.length: entry for entry in sorted(found, key=lambda entry: -entry.seconds)}
    return Table(tuple(fastest[length] for length in sorted(fastest)))


def entries_before(
    folder: Path, base: str, facts: Mapping[str, Any], entries: Sequence[PartitionEntry]
) -> list[PartitionEntry]:
    """Return the entries of a stored table that ``entries`` do not replace: those of other lengths, if it fits."""
    try:
        table = read_table(folder, base, facts)
    except CheckpointError:  # there is none, or one that nobody would read any more
        return []
    lengths = {entry.length for entry in entries}
    return [entry for entry in table.entries if entry.length not in lengths]


def _entry_of(row: Any, num_ranks: int) -> PartitionEntry | None:
    """Return what a stored row says, or None where the row is damaged."""
    try:
        length, counts, seconds, even_s = row
        entry = PartitionEntry(length, tuple(counts), float(seconds), float(even_s))
    except (TypeError, ValueError, OverflowError):
        return None
    is_whole = all(type(number) is int and number > 0 for number in (length, *entry.counts))
    if not is_whole or sum(entry.counts) != length or len(entry.counts) > num_ranks:
        return None
    return entry if all(isfinite(s) and s >= 0 for s in (entry.seconds, entry.even_s)) else None

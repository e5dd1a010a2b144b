"""Which experts stay, and which are loaded before anyone asks: policies of the expert cache, pure arithmetic.

Time is a *clock* of layers: pass number times layers of the model, plus the layer. An expert is (layer, expert). The
cache (``experts.py``) and the simulator (``simulator.py``) tell a policy what was used and what is expected, and ask
it when an expert will be needed next; the one that is needed last is evicted. Guesses themselves come from outside:
from the slow residual (``experts_guess.py``) or from an accelerated one (``multirate/foresight.py``).

The baselines: reading on demand without a cache; least recently used, whose misses of a layer are read in parallel;
the most frequent experts pinned (static frequency); the next layer's router on the present residual (Eliseev and
Mazur 2023, arXiv:2312.17238); and an oracle that knows a recorded trace. Loading ahead of time by the accelerated
residual is M2R2's (Bhendawade et al. 2025, arXiv:2502.02040); evicting by predicted next use is ours.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vivace.errors import CorruptError, NotFoundError
from vivace.files import write_text

FloatArray = NDArray[np.float64]
Key = tuple[int, int]
"""(layer, expert)."""

EVERY = slice(None)


class Policy(Protocol):
    """What a cache of experts asks."""

    name: str
    keeps: bool
    """Experts stay after their layer has run."""

    def used(self, key: Key, clock: int) -> None:
        """The router chose it."""
        ...

    def expected(self, key: Key, due: int) -> None:
        """It is likely to be chosen at clock ``due``."""
        ...

    def next_use(self, key: Key, clock: int) -> float:
        """Clock at which it is needed next, as far as one can tell."""
        ...

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """``next_use`` of each."""
        ...

    def ahead(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Loads worth starting when layer ``clock`` begins, most urgent first: (expert, when it is due)."""
        ...


class LeastRecent:
    """On demand; the least recently used goes first."""

    name = "lru"
    keeps = True

    def __init__(self) -> None:
        self.last: dict[Key, int] = {}

    def used(self, key: Key, clock: int) -> None:
        """Remember when."""
        self.last[key] = clock

    def expected(self, key: Key, due: int) -> None:
        """Loaded by the cache; it decides nothing about eviction here, but it counts as fresh."""
        self.last[key] = max(self.last.get(key, due), due)

    def next_use(self, key: Key, clock: int) -> float:
        """As far ahead as its last use lies behind; of those used together, the first goes first."""
        return 2 * clock - self.last.get(key, -1) - key[1] * 1e-6

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """One by one."""
        return [self.next_use(key, clock) for key in keys]

    def ahead(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Nothing."""
        return ()


class OnDemand(LeastRecent):
    """No cache: every expert is read when its layer runs."""

    name = "on_demand"
    keeps = False


class Static(LeastRecent):
    """The most frequent experts of a trace never leave; the others take turns in what is left."""

    name = "static"

    def __init__(self, pinned: Iterable[Key]) -> None:
        super().__init__()
        self.pinned = tuple(pinned)
        self._is_pinned = frozenset(self.pinned)

    @staticmethod
    def of(trace: Trace, num_slots: int) -> Static:
        """Pin all slots but what one layer's experts need."""
        count = max(0, num_slots - trace.widest)
        return Static(trace.most_frequent()[:count])

    def next_use(self, key: Key, clock: int) -> float:
        """Now, for those that are pinned."""
        return clock if key in self._is_pinned else super().next_use(key, clock)

    def ahead(self, clock: int) -> Iterable[tuple[Key, int]]:
        """The pinned ones, once."""
        return ((key, clock + 1) for key in self.pinned) if clock == 0 else ()


class NextUse:
    """Eviction by predicted next use: when it is expected, else its layer's next turn and, on top, the passes that lie
    between two uses of an expert that is used as often as this one was lately.
    """

    keeps = True
    FRESH = 0.05
    """Weight of the last pass in how often an expert is used."""
    RARE = 0.02
    """How often one is used that has not been seen, or not for long."""

    def __init__(self, num_layers: int, name: str = "ahead") -> None:
        """Name it after who guesses.

        Args:
            num_layers: of the model: layers per pass.
            name: shown in reports.
        """
        self.name = name
        self.num_layers = num_layers
        self._rows: dict[Key, int] = {}
        """Of an expert in the table."""
        self._layer, self._share, self._then, self._due = np.zeros((4, 0))
        """By row: the layer; the share of passes that used it, after the pass ``then``; when it is expected."""

    def _row(self, key: Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row == len(self._layer):
                new = np.outer([0, self.RARE, 0, -1], np.ones(max(64, row)))
                old = self._layer, self._share, self._then, self._due
                self._layer, self._share, self._then, self._due = np.concatenate((old, new), axis=1)
            self._layer[row] = key[0]
        return row

    def used(self, key: Key, clock: int) -> None:
        """One more pass that used it."""
        row, here = self._row(key), clock // self.num_layers
        share = self._shares(here, row)
        self._share[row], self._then[row] = share + self.FRESH * (1 - share), here

    def _shares(self, here: int, rows: int | slice = EVERY) -> FloatArray:
        """As of a pass: they fade while others are used."""
        fading: FloatArray = (1 - self.FRESH) ** (here - self._then[rows])
        return self.RARE + (self._share[rows] - self.RARE) * fading

    def expected(self, key: Key, due: int) -> None:
        """Remember for when."""
        row = self._row(key)  # may make room
        self._due[row] = due

    def next_use(self, key: Key, clock: int) -> float:
        """The clock it is due; else its layer's next turn and as many passes more as its share says."""
        row = self._row(key)
        due = float(self._due[row])
        return due if due > clock else float(self._later(clock, row))

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """All in a few operations: the cache asks about every expert it holds."""
        rows = [self._row(key) for key in keys]
        due, later = self._due, self._later(clock, EVERY)
        return np.where(due > clock, due, later)[rows].tolist()  # type: ignore[no-any-return]

    def _later(self, clock: int, rows: int | slice) -> FloatArray:
        layers = self.num_layers
        turn = clock + 1 + (self._layer[rows] - clock - 1) % layers
        between = 1 / self._shares(clock // layers, rows) - 1
        return turn + layers * between + 0.5  # what is expected goes before what merely was there

    def ahead(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Whatever is expected is asked for by the cache itself."""
        return ()


class Oracle:
    """Knows the trace: loads in the order of use, evicts what is needed last (Belady 1966)."""

    name = "oracle"
    keeps = True

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._clocks = [visit.clock for visit in trace.visits]
        self._uses: dict[Key, list[int]] = {}
        for visit in trace.visits:
            for key in visit.keys(trace.num_layers):
                self._uses.setdefault(key, []).append(visit.clock)

    def used(self, key: Key, clock: int) -> None:
        """It knew."""

    def expected(self, key: Key, due: int) -> None:
        """It knows better."""

    def next_use(self, key: Key, clock: int) -> float:
        """From the trace; never is infinity."""
        uses = self._uses.get(key, [])
        place = bisect_right(uses, clock)
        return uses[place] if place < len(uses) else inf

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """One by one."""
        return [self.next_use(key, clock) for key in keys]

    def ahead(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Everything of the next pass's worth of layers, in order."""
        first = bisect_right(self._clocks, clock)
        for visit in self.trace.visits[first : first + self.trace.num_layers]:
            for key in visit.keys(self.trace.num_layers):
                yield key, visit.clock


@dataclass(frozen=True)
class Visit:
    """A layer ran: who was chosen."""

    clock: int
    num_rows: int
    chosen: tuple[int, ...]

    def keys(self, num_layers: int) -> list[Key]:
        """The experts."""
        return [(self.clock % num_layers, expert) for expert in self.chosen]


@dataclass(frozen=True)
class Hint:
    """Experts were expected."""

    issued: int
    """Clock of the last layer that had run."""
    due: int
    likely: tuple[int, ...]
    """Most likely first."""


@dataclass
class Trace:
    """What routers chose and what was expected, in order; grows while it is recorded."""

    num_layers: int
    visits: list[Visit] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    @property
    def widest(self) -> int:
        """Most experts chosen at once."""
        return max((len(visit.chosen) for visit in self.visits), default=0)

    def most_frequent(self) -> list[Key]:
        """Experts by how often they were chosen."""
        counts: dict[Key, int] = {}
        for visit in self.visits:
            for key in visit.keys(self.num_layers):
                counts[key] = counts.get(key, 0) + 1
        return sorted(counts, key=lambda key: (-counts[key], key))

    def recall(self) -> float:
        """Share of chosen experts that were expected in time, over the visits anything was expected for."""
        expected: dict[int, set[int]] = {}
        for hint in self.hints:
            assert hint.issued < hint.due, "a guess for a layer that has run is no guess"
            expected.setdefault(hint.due, set()).update(hint.likely)
        known = [visit for visit in self.visits if visit.clock in expected]
        right = sum(len(expected[visit.clock].intersection(visit.chosen)) for visit in known)
        return right / max(1, sum(len(visit.chosen) for visit in known))

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        visits = [[v.clock, v.num_rows, list(v.chosen)] for v in self.visits]
        hints = [[h.issued, h.due, list(h.likely)] for h in self.hints]
        write_text(Path(path), json.dumps({"num_layers": self.num_layers, "visits": visits, "hints": hints}) + "\n")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what ``save`` wrote.

        Raises:
            NotFoundError: no such file.
            CorruptError: it is not a trace.
        """
        try:
            found: Mapping[str, Sequence[Sequence[object]]] = json.loads(Path(path).read_text(encoding="utf-8"))
            visits = [Visit(int(c), int(n), tuple(map(int, e))) for c, n, e in found["visits"]]  # type: ignore
            hints = [Hint(int(i), int(d), tuple(map(int, e))) for i, d, e in found["hints"]]  # type: ignore
            return Trace(int(found["num_layers"]), visits, hints)  # type: ignore
        except OSError as exc:
            raise NotFoundError(f"cannot read the trace {path}: {exc.strerror}; record one first") from exc
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptError(f"{path} is not a trace of experts: {exc!r}; record it again") from exc

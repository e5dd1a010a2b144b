"""What a run over experts leaves behind: who was chosen, and what was said of it before; read by the simulator.

A clock counts layers: pass number times layers of the model, plus the layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vivace.errors import CorruptError, NotFoundError
from vivace.files import write_text

Key = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True)
class Visit:
    """A layer ran: who was chosen."""

    clock: int
    is_prompt: bool
    """Rows of prompts, not of answers."""
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


@dataclass(frozen=True)
class Outlook:
    """It was foretold when a layer's experts will be chosen again."""

    issued: int
    """Clock of the last layer that had run."""
    layer: int
    turn: int
    """Of the pass that is counted from."""
    passes: tuple[float, ...]


@dataclass
class Trace:
    """What routers chose, what was expected and foretold, in order; grows while it is recorded."""

    num_layers: int
    visits: list[Visit] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    outlooks: list[Outlook] = field(default_factory=list)

    @property
    def num_experts(self) -> int:
        """Of a layer, as far as they were chosen, expected or foretold."""
        named = max((max(each, default=-1) for each in self._named()), default=-1)
        return max(1 + named, max((len(each.passes) for each in self.outlooks), default=0))

    def _named(self) -> Iterator[tuple[int, ...]]:
        yield from (visit.chosen for visit in self.visits)
        yield from (hint.likely for hint in self.hints)

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
        """Share of chosen experts that were expected last, over the visits anything was expected for."""
        expected: dict[int, set[int]] = {}
        for hint in self.hints:
            assert hint.issued < hint.due, "a guess for a layer that has run is no guess"
            expected[hint.due] = set(hint.likely)
        known = [visit for visit in self.visits if visit.clock in expected]
        right = sum(len(expected[visit.clock].intersection(visit.chosen)) for visit in known)
        return right / max(1, sum(len(visit.chosen) for visit in known))

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        visits = [[v.clock, v.is_prompt, list(v.chosen)] for v in self.visits]
        hints = [[h.issued, h.due, list(h.likely)] for h in self.hints]
        outlooks = [[o.issued, o.layer, o.turn, [round(each, 2) for each in o.passes]] for o in self.outlooks]
        told = {"num_layers": self.num_layers, "visits": visits, "hints": hints, "outlooks": outlooks}
        write_text(Path(path), json.dumps(told) + "\n")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what ``save`` wrote.

        Raises:
            NotFoundError: no such file.
            CorruptError: it is not a trace.
        """
        try:
            found: Mapping[str, Sequence[Sequence[object]]] = json.loads(Path(path).read_text(encoding="utf-8"))
            visits = [Visit(int(c), p, tuple(map(int, e))) for c, p, e in found["visits"]]  # type: ignore
            if not all(isinstance(visit.is_prompt, bool) for visit in visits):
                raise TypeError("it does not say which visits were of prompts")
            hints = [Hint(int(i), int(d), tuple(map(int, e))) for i, d, e in found["hints"]]  # type: ignore
            outlooks = [Outlook(int(i), int(n), int(t), tuple(map(float, p))) for i, n, t, p in found["outlooks"]]  # type: ignore
            return Trace(int(found["num_layers"]), visits, hints, outlooks)  # type: ignore
        except OSError as exc:
            raise NotFoundError(f"cannot read the trace {path}: {exc.strerror}; record one first") from exc
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptError(f"{path} is not a trace of experts: {exc!r}; record it again") from exc

"""Traces of mixtures of experts: what routers chose and what was predicted, recorded for the simulator.

A clock counts layers: the number of the pass times the layers of the model, plus the layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vivace.errors import CorruptError, NotFoundError
from vivace.files import write_text
from vivace.storage.experts.policy import Key, Policy


@dataclass(frozen=True)
class Visit:
    """One layer's run, with the experts that its router chose."""

    clock: int
    is_prompt: bool
    """Whether the rows belonged to prompts."""
    chosen: tuple[int, ...]

    def keys(self, num_layers: int) -> list[Key]:
        """Return the experts as pairs of layer and number."""
        return [(self.clock % num_layers, expert) for expert in self.chosen]


@dataclass(frozen=True)
class Prediction:
    """Experts that were predicted for a layer."""

    issued: int
    """Clock of the last layer that had run."""
    due: int
    """Clock of the layer for which they are predicted."""
    likely: tuple[int, ...]
    """The experts, the most likely first."""


@dataclass(frozen=True)
class ReusePrediction:
    """A prediction of the number of passes after which a layer's experts are chosen again."""

    issued: int
    """Clock of the last layer that had run."""
    layer: int
    turn: int
    """Number of the pass from which passes are counted."""
    passes: tuple[float, ...]
    """Number of passes for each expert of the layer."""


@dataclass
class Trace:
    """What routers chose and what was predicted, in order."""

    num_layers: int
    visits: list[Visit] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    reuses: list[ReusePrediction] = field(default_factory=list)

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer, as far as they were chosen or predicted."""
        named = max((max(each, default=-1) for each in self._named()), default=-1)
        return max(1 + named, max((len(each.passes) for each in self.reuses), default=0))

    def _named(self) -> Iterator[tuple[int, ...]]:
        yield from (visit.chosen for visit in self.visits)
        yield from (each.likely for each in self.predictions)

    @property
    def widest(self) -> int:
        """Largest number of experts chosen at once."""
        return max((len(visit.chosen) for visit in self.visits), default=0)

    def most_frequent(self) -> list[Key]:
        """Return the experts, the most frequently chosen first."""
        counts: dict[Key, int] = {}
        for visit in self.visits:
            for key in visit.keys(self.num_layers):
                counts[key] = counts.get(key, 0) + 1
        return sorted(counts, key=lambda key: (-counts[key], key))

    def recall(self) -> float:
        """Return the share of the chosen experts that were in the last prediction, over layers with a prediction."""
        expected: dict[int, set[int]] = {}
        for each in self.predictions:
            assert each.issued < each.due, "a prediction for a layer that has run is no prediction"
            expected[each.due] = set(each.likely)
        known = [visit for visit in self.visits if visit.clock in expected]
        right = sum(len(expected[visit.clock].intersection(visit.chosen)) for visit in known)
        return right / max(1, sum(len(visit.chosen) for visit in known))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        visits = [[v.clock, v.is_prompt, list(v.chosen)] for v in self.visits]
        hints = [[h.issued, h.due, list(h.likely)] for h in self.predictions]
        outlooks = [[o.issued, o.layer, o.turn, [round(each, 2) for each in o.passes]] for o in self.reuses]
        told = {"num_layers": self.num_layers, "visits": visits, "hints": hints, "outlooks": outlooks}
        write_text(Path(path), json.dumps(told) + "\n")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace that ``save`` wrote.

        Raises:
            NotFoundError: there is no such file.
            CorruptError: it is not a trace.
        """
        try:
            found: Mapping[str, Sequence[Sequence[object]]] = json.loads(Path(path).read_text(encoding="utf-8"))
            visits = [Visit(int(c), p, tuple(map(int, e))) for c, p, e in found["visits"]]  # type: ignore
            if not all(isinstance(visit.is_prompt, bool) for visit in visits):
                raise TypeError("it does not say which visits were of prompts")
            predictions = [Prediction(int(i), int(d), tuple(map(int, e))) for i, d, e in found["hints"]]  # type: ignore
            reuses = [ReusePrediction(int(i), int(n), int(t), tuple(map(float, p))) for i, n, t, p in found["outlooks"]]  # type: ignore
            return Trace(int(found["num_layers"]), visits, predictions, reuses)  # type: ignore
        except OSError as exc:
            raise NotFoundError(f"cannot read the trace {path}: {exc.strerror}; record one first") from exc
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptError(f"{path} is not a trace of experts: {exc!r}; record it again") from exc


class RecordingPolicy:
    """Wraps a policy and records all calls of the expert cache in a trace."""

    def __init__(self, policy: Policy, num_layers: int) -> None:
        """Wrap a policy.

        Args:
            policy: the policy whose answers are returned.
            num_layers: number of layers of the model.
        """
        self.policy = policy
        self.name, self.keeps = policy.name, policy.keeps
        self.trace = Trace(num_layers)
        self._clock = -1

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Record the experts of a layer."""
        self._clock = clock
        self.trace.visits.append(Visit(clock, is_prompt, tuple(chosen)))
        self.policy.used(layer, chosen, clock, is_prompt=is_prompt)

    def predicted(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Record a prediction."""
        self.trace.predictions.append(Prediction(self._clock, due, tuple(likely)))
        self.policy.predicted(layer, likely, due)

    def reuse_predicted(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Record a prediction of when experts are used again."""
        self.trace.reuses.append(ReusePrediction(self._clock, layer, turn, tuple(passes)))
        self.policy.reuse_predicted(layer, passes, turn)

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Return the wrapped policy's answer."""
        return self.policy.next_uses(keys, clock)

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return the wrapped policy's answer."""
        return self.policy.prefetches(clock)

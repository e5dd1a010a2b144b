"""Baselines for the policy of the expert cache.

They are: loading on demand without a cache; evicting the least recently used expert, with the misses of a layer read in
parallel; pinning the most frequent experts (static frequency); and an oracle that has the recorded trace (Belady 1966).
The fifth baseline, the router of the next layer on the current residual (Eliseev and Mazur 2023, arXiv:2312.17238), is
a way to predict and not a policy: ``expert_guesses.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from benchmarks.expert_traces import Trace
from vivace.storage.experts.policy import Key

NOTHING: tuple[frozenset[int], int] = (frozenset(), -1)
"""Prediction for a layer for which there is none."""


class LeastRecent:
    """Loads on demand and evicts the expert that was used longest ago."""

    name = "lru"
    keeps = True

    def __init__(self) -> None:
        self.last: dict[Key, int] = {}
        self._predictions: dict[int, tuple[frozenset[int], int]] = {}
        """Experts that were predicted last for each layer, and the clock for which they were."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Record when experts were used."""
        for expert in chosen:
            self.last[layer, expert] = clock

    def predicted(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Treat predicted experts as used at that clock, so that they are not evicted before."""
        self._predictions[layer] = frozenset(likely), due

    def reuse_predicted(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Do nothing, since this policy only looks at the past."""

    def next_use(self, key: Key, clock: int) -> float:
        """Return a clock as far ahead as the last use is behind; of experts used together, the first is evicted
        first.
        """
        layer, expert = key
        likely, due = self._predictions.get(layer, NOTHING)
        last = self.last.get(key, -1)
        return 2 * clock - (max(last, due) if expert in likely else last) - expert * 1e-6

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Return the next use of each expert."""
        return [self.next_use(key, clock) for key in keys]

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return nothing, since this policy does not prefetch."""
        return ()


class OnDemand(LeastRecent):
    """Keeps nothing: every expert is read when its layer runs."""

    name = "on_demand"
    keeps = False


class Static(LeastRecent):
    """Pins the most frequent experts of a trace; the others share the remaining slots."""

    name = "static"

    def __init__(self, pinned: Iterable[Key]) -> None:
        super().__init__()
        self.pinned = tuple(pinned)
        self._is_pinned = frozenset(self.pinned)

    @staticmethod
    def of(trace: Trace, num_slots: int) -> Static:
        """Pin experts in all slots except those that the experts of one layer need."""
        count = max(0, num_slots - trace.widest)
        return Static(trace.most_frequent()[:count])

    def next_use(self, key: Key, clock: int) -> float:
        """Return the current clock for a pinned expert, so that it is never evicted."""
        return clock if key in self._is_pinned else super().next_use(key, clock)

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return the pinned experts, once."""
        return ((key, clock + 1) for key in self.pinned) if clock == 0 else ()


class Oracle:
    """Uses the recorded trace: it loads in the order of use and evicts the expert whose next use is last."""

    name = "oracle"
    keeps = True

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._clocks = [visit.clock for visit in trace.visits]
        self._uses: dict[Key, list[int]] = {}
        for visit in trace.visits:
            for key in visit.keys(trace.num_layers):
                self._uses.setdefault(key, []).append(visit.clock)

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Do nothing, since the trace has all uses."""

    def predicted(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Do nothing, since the trace has all uses."""

    def reuse_predicted(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Do nothing, since the trace has all uses."""

    def next_use(self, key: Key, clock: int) -> float:
        """Return the next use in the trace; infinity if there is none."""
        uses = self._uses.get(key, [])
        place = bisect_right(uses, clock)
        return uses[place] if place < len(uses) else inf

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Return the next use of each expert."""
        return [self.next_use(key, clock) for key in keys]

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return what the next layers will use, for as many layers as a pass has, in order."""
        first = bisect_right(self._clocks, clock)
        for visit in self.trace.visits[first : first + self.trace.num_layers]:
            for key in visit.keys(self.trace.num_layers):
                yield key, visit.clock

"""Which experts stay, and which are loaded before anyone asks: policies of the expert cache, pure arithmetic.

Time is a *clock* of layers: pass number times layers of the model, plus the layer. An expert is (layer, expert). The
cache (``experts.py``) and the simulator (``simulator.py``) tell a policy what was used and what is expected, and ask
it when an expert will be needed next; the one that is needed last is evicted. Guesses themselves come from outside:
from the slow residual (``experts_guess.py``), or from a forecast or an accelerated residual
(``methods/foresight``).

The baselines: reading on demand without a cache; least recently used, whose misses of a layer are read in parallel;
the most frequent experts pinned (static frequency); the next layer's router on the present residual (Eliseev and
Mazur 2023, arXiv:2312.17238); and an oracle that knows a recorded trace. Loading ahead of time by the accelerated
residual is M2R2's (Bhendawade et al. 2025, arXiv:2502.02040); evicting by predicted next use, learnt
(``methods/foresight/forecast.py``) or reckoned from how often an expert was used lately, is ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vivace.storage.traces import Key, Trace

FloatArray = NDArray[np.float64]
NOT_SEEN = 64.0
"""Passes after a prompt; what none of them uses counts as used then."""
NOBODY: tuple[frozenset[int], int] = (frozenset(), -1)
"""Expected of a layer of which nothing was said."""
BEHIND = 0.5
"""Of a layer: what is expected goes before what merely was there."""


class Policy(Protocol):
    """What a cache of experts asks."""

    name: str
    keeps: bool
    """Experts stay after their layer has run."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """A layer's router chose these, for a prompt's rows or for others."""
        ...

    def expected(self, layer: int, likely: Sequence[int], due: int) -> None:
        """These experts of a layer, and no others, are likely to be chosen at clock ``due``."""
        ...

    def foretold(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """After pass ``turn``, each expert of a layer is thought to be chosen again that many passes later."""
        ...

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Clocks at which they are needed next, as far as one can tell."""
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
        self._expected: dict[int, tuple[frozenset[int], int]] = {}
        """By layer, what was said last: whom, and for when."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Remember when."""
        for expert in chosen:
            self.last[layer, expert] = clock

    def expected(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Loaded by the cache; it decides nothing about eviction here, but it counts as fresh."""
        self._expected[layer] = frozenset(likely), due

    def foretold(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """The past decides."""

    def next_use(self, key: Key, clock: int) -> float:
        """As far ahead as its last use lies behind; of those used together, the first goes first."""
        layer, expert = key
        likely, due = self._expected.get(layer, NOBODY)
        last = self.last.get(key, -1)
        return 2 * clock - (max(last, due) if expert in likely else last) - expert * 1e-6

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
    """Eviction by predicted next use: when it is expected, else its layer's turn after the passes it will be idle.

    Those are the passes between two uses of an expert that is used as often as this one was lately, f. Where it was
    foretold to be used again after n, the forecast, which knows the words, is weighed against the past, which knows
    this text: n^w f^(1 - w). A prompt chooses nearly all experts, whatever comes of it: until something is foretold of
    its answer, an expert is thought to be needed when it was after earlier prompts.
    """

    keeps = True
    FRESH = 0.07
    """Weight of the last pass in how often an expert is used."""
    RARE = 0.02
    """How often one is used that has not been seen, or not for long."""
    FORETOLD = 0.4
    """w."""
    OPENING = 0.1
    """Weight of the last answer in when an expert is first used after a prompt."""

    def __init__(self, num_layers: int, num_experts: int, name: str = "ahead") -> None:
        """Name it after who guesses.

        Args:
            num_layers: of the model: layers per pass.
            num_experts: of a layer.
            name: shown in reports.
        """
        self.name = name
        self.num_layers, self.num_experts = num_layers, num_experts
        shape = num_layers, num_experts
        self._layer = np.repeat(np.arange(num_layers, dtype=np.float64), num_experts)
        """By row, layer times experts plus expert, as all that follow."""
        self._share, self._then = np.full(shape, self.RARE).reshape(-1), np.zeros(shape).reshape(-1)
        """The share of passes that used it, after the pass ``then``."""
        self._due, self._again = np.full(shape, -1.0).reshape(-1), np.full(shape, -1.0).reshape(-1)
        """Clocks: for when each is expected, and at which it was foretold to be used again; -1 where nobody said."""
        self._expected: dict[int, tuple[Sequence[int], int]] = {}
        self._foretold: dict[int, tuple[Sequence[float], int]] = {}
        self._used: list[int] = []
        self._turn = 0
        """What was told by layer, and rows used in this pass, since the arrays were brought up to date. Small
        operations on arrays cost more than they do: they are put off until somebody asks."""
        self._opened, self._is_answered, self._is_told = -1, False, False
        """Pass of the last prompt; whether one of an answer came behind it; and whether that ever happened."""
        self._first = np.full(shape, NOT_SEEN).reshape(-1)
        """Passes from the last prompt to its first use, as far as it was used."""
        self._opening = np.full(shape, np.log2(NOT_SEEN) / 2).reshape(-1)
        """log2 of that, after earlier prompts."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """One more pass that used them."""
        here = clock // self.num_layers
        if here != self._turn:
            self._count()
            self._turn = here
        if not is_prompt:
            self._is_answered = True
        elif self._opened < here:
            self._open(here)
        first = layer * self.num_experts
        self._used += [first + expert for expert in chosen]

    def expected(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Remember for when."""
        self._expected[layer] = likely, due

    def foretold(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Remember for when: its layer's turn, that many passes later."""
        self._foretold[layer] = passes, turn

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """All in a few operations: the cache asks about every expert it holds."""
        self._learn()
        uses = np.where(self._due > clock, self._due, self._later(clock))
        return uses[[layer * self.num_experts + expert for layer, expert in keys]].tolist()  # type: ignore[no-any-return]

    def _learn(self) -> None:
        """Bring the arrays up to date."""
        self._count()
        for layer, (likely, due) in self._expected.items():
            first = layer * self.num_experts
            self._due[first : first + self.num_experts] = -1
            self._due[[first + expert for expert in likely]] = due
        if self._foretold:
            layers = np.fromiter(self._foretold, dtype=np.intp)
            turns = np.array([turn for _, turn in self._foretold.values()])
            passes = np.array([passes for passes, _ in self._foretold.values()])
            again = self._again.reshape(self.num_layers, -1)
            again[layers] = (turns[:, None] + passes) * self.num_layers + layers[:, None]
        self._expected.clear()
        self._foretold.clear()

    def _count(self) -> None:
        """What this pass used: shares fade while others are used."""
        if not self._used:
            return
        rows, here = np.array(self._used, dtype=np.intp), self._turn
        share = self._shares(here)[rows]
        self._share[rows], self._then[rows] = share + self.FRESH * (1 - share), here
        if self._opened < here:
            self._first[rows] = np.minimum(self._first[rows], here - self._opened)
        self._used.clear()

    def _open(self, here: int) -> None:
        """A prompt begins: what was foretold was of another text."""
        if self._is_answered and self._opened >= 0:
            self._opening += self.OPENING * (np.log2(self._first) - self._opening)
            self._is_told = True
        self._opened, self._is_answered = here, False
        self._first[:] = NOT_SEEN
        self._foretold.clear()
        self._again[:] = -1

    def _shares(self, here: int) -> FloatArray:
        """Of the passes up to one, those that used an expert, the late ones weighing more."""
        fading: FloatArray = (1 - self.FRESH) ** (here - self._then)
        return self.RARE + (self._share - self.RARE) * fading

    def _later(self, clock: int) -> FloatArray:
        """When each is needed if it is not expected."""
        layers = self.num_layers
        if self._is_told and clock // layers == self._opened and self._again.max() < 0:
            after: FloatArray = self._opened + np.exp2(self._opening)
            return after * layers + self._layer + BEHIND
        turn = clock + 1 + (self._layer - clock - 1) % layers
        idle = 1 / self._shares(clock // layers)
        foretold = np.maximum((self._again - turn) / layers + 1, 1)
        weighed = foretold**self.FORETOLD * idle ** (1 - self.FORETOLD)
        later: FloatArray = turn + layers * (np.where(self._again > clock, weighed, idle) - 1) + BEHIND
        return later

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

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """It knew."""

    def expected(self, layer: int, likely: Sequence[int], due: int) -> None:
        """It knows better."""

    def foretold(self, layer: int, passes: Sequence[float], turn: int) -> None:
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

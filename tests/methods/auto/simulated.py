"""Drafters that cost and hit as they are told, on a clock that only they move: ``auto`` is judged against the best."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vivace.core.seams import Verdict, VerifiedStep
from vivace.decode.plain import NoDrafts
from vivace.methods.auto.drafter import Adaptive
from vivace.methods.auto.measured import LONGEST
from vivace.methods.auto.memory import KeptMeasurements
from vivace.methods.auto.regime import Regime

ONE = Regime(1)


@dataclass
class Simulated:
    """A drafter of a machine and a text that exist only here."""

    name: str
    guess_s: float
    """Seconds of one guess, where a pass of one row takes one second."""
    row_s: float
    """Seconds of one more row in a pass."""
    chance: float
    """Chance that a guess is right if the one before it is."""
    longest: int = 6
    """Guesses it makes where more are allowed."""

    def rate(self, guesses: int) -> float:
        """Return its expected tokens per second with so many guesses allowed."""
        n = min(guesses, self.longest)
        return sum(self.chance**depth for depth in range(n + 1)) / (1 + n * (self.guess_s + self.row_s))

    @property
    def best(self) -> float:
        """Return its highest expected rate, at least that of drafting nothing."""
        return max(self.rate(n) for n in range(LONGEST + 1))


@dataclass
class Machine:
    """Runs steps as ``auto`` chooses them, and counts tokens and seconds."""

    drafters: Sequence[Simulated]
    seed: int = 0
    memory: KeptMeasurements | None = None
    noise: float = 0.1
    """Times are within this share of what they should be."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the weights of drafters, by name."""
    per_call: Sequence[int] = ()
    """Steps that each drafter makes in a call, plain decoding first; one, where nothing is said."""
    now: float = 0.0
    tokens: int = 0
    used: list[int] = field(default_factory=list)
    spent: Counter[int] = field(default_factory=Counter)
    """Seconds by drafter."""

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)
        named = [NoDrafts(drafter.name) for drafter in self.drafters]
        self.auto = Adaptive(named, memory=self.memory, weights=self.weights, clock=lambda: self.now)

    def run(self, seconds: float, regime: Regime = ONE, slow: Callable[[float], float] = lambda now: 1.0) -> float:
        """Decode for so many seconds; return the tokens per second."""
        stop, before, begun = self.now + seconds, self.tokens, self.now
        while self.now < stop:
            self.step(regime, slow)
        return (self.tokens - before) / (self.now - begun)

    def step(self, regime: Regime, slow: Callable[[float], float] = lambda now: 1.0) -> None:
        """Make one call for all sequences of the regime, each with its own luck."""
        choice = self.auto.choose(regime, LONGEST)
        drafter = self.drafters[choice.drafter - 1] if choice.drafter else None
        guesses = 0 if drafter is None else min(choice.guesses, drafter.longest)
        count = self.per_call[choice.drafter] if self.per_call else 1
        kept = [[self._kept(drafter, guesses) for _ in range(count)] for _ in range(regime.batch)]
        self.tokens += sum(map(sum, kept))
        took = 1.0 if drafter is None else 1.0 + guesses * (drafter.guess_s + drafter.row_s)
        took *= count * slow(self.now) * self.draws.uniform(1 - self.noise, 1 + self.noise)
        self.now += took
        self.used.append(choice.drafter)
        self.spent[choice.drafter] += took
        steps = tuple(tuple(VerifiedStep(n, tuple(range(1, guesses + 1))) for n in row) for row in kept)
        self.auto.record(regime, choice.drafter, took, choice.guesses, Verdict((), (), steps))

    def _kept(self, drafter: Simulated | None, guesses: int) -> int:
        """Return how many tokens a step gives."""
        kept = 1
        while drafter is not None and kept <= guesses and self.draws.random() < drafter.chance:
            kept += 1
        return kept

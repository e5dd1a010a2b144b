"""What is known of one drafter in one regime: what its steps cost, and how many of its guesses are kept.

The rate of a step that allows n guesses is ``E(n) / t(n)`` tokens per second. ``E(n) = 1 + sum_{i<=n} p_i`` is its
expected number of tokens, p_i the share of steps in which the guess at depth i was accepted, and t(n) the wall time of
a step, ``a + b g`` fitted to steps measured on this machine. g is the number of guesses that are made where n are
allowed: a drafter that is not sure makes fewer.

Both are kept twice, as decayed sums. *Recent* steps follow the text at hand: their weight halves in 34 steps. *Usual*
ones are those of hundreds of steps, of other texts and of earlier runs; they count as much as ``PRIOR`` steps. So four
steps in which guesses happened to be right do not make a drafter the best, and what is usual is believed again where
nothing was seen for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

FORGET = 0.98
"""Factor on the weight of a recent step with each further step of its regime, whoever makes it."""
FORGET_USUAL = 0.99
"""The same factor for usual steps, with each further step of the same drafter."""
PRIOR = 8.0
"""Number of steps that usual ones count for beside recent ones."""
LONGEST = 8
"""Largest number of guesses considered."""
BUSY = 8.0
"""A step counts for at most this many times what was expected of it: a machine may be busy for a moment."""
WAS_BUSY = 2.0
"""Older steps count for at most this many times what a step takes now, since a machine that was busy is no measure, and
none is faster than it is."""
INHERITED = 2.0
"""Number of steps in which a guess is taken to be kept as often as the one above it, of ``PRIOR`` that are known."""
LOOK_EVERY = 32
"""Short steps after which the longest draft is asked for again; doubled each time that was in vain."""
LONGEST_WAIT = 512
"""Largest number of such steps."""


NUM_LINE = 5
"""Numbers of ``Sums`` that the fitted line needs, before the counts by depth."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Decayed sums over steps, for a least-squares line of time over guesses and for acceptance by depth.

    ``numbers`` holds the sums of weights, of guesses n, of n^2, of seconds t and of n t; then by depth how often a
    guess was allowed (*tried*), how often there was one (*made*; drafters that are not sure make fewer), and how often
    it was accepted (*kept*).
    """

    numbers: FloatArray = field(default_factory=lambda: np.zeros(NUM_LINE + 3 * LONGEST))

    @property
    def weight(self) -> float:
        """Return the number of steps, old ones counted as less than one."""
        return float(self.numbers[0])

    @property
    def total_s(self) -> float:
        """Return the seconds of these steps. The line through them may say that one without guesses takes none."""
        return float(self.numbers[3])

    def times(self, share: float) -> Sums:
        """Return the sums with all weights multiplied."""
        return Sums(share * self.numbers)

    def plus(self, other: Sums) -> Sums:
        """Return the sums over both."""
        return Sums(self.numbers + other.numbers)

    def at_most(self, weight: float) -> Sums:
        """Return the sums as those of at most so many steps."""
        return self.times(weight / self.weight) if self.weight > weight else self

    def with_seconds_times(self, factor: float) -> Sums:
        """Return the sums as if every step had taken so many times as long."""
        numbers = self.numbers.copy()
        numbers[3:NUM_LINE] *= factor
        return Sums(numbers)

    def foretells(self, guesses: float) -> bool:
        """Return whether a time is known for so many guesses: it is, or two others are that make a line."""
        weight, n, nn = map(float, self.numbers[:3])
        return weight * nn - n**2 > 1e-9 * weight**2 or abs(guesses - n / weight) < 1e-9

    def seconds(self, guesses: float) -> float:
        """Return t(n): the fitted line, constant while only one n has been seen."""
        weight, n, nn, t, nt = map(float, self.numbers[:NUM_LINE])
        spread = weight * nn - n**2
        slope = (weight * nt - n * t) / spread if spread > 1e-9 * weight**2 else 0.0
        slope = min(max(slope, 0.0), t / max(n, 1e-9))  # a step of no guesses takes no less than no time
        return max((t - slope * n) / weight + slope * guesses, 1e-9)

    def expected(self, inherited: float = 0.0) -> list[tuple[float, float]]:
        """Return (tokens, guesses) of a step by how many guesses are allowed, from 0 to the deepest ever tried.

        The chance that a guess is kept if the one above it was counts ``inherited`` steps with the chance above, so
        that a depth seen a few times without luck is not given up for good.
        """
        tried, made, kept = (row.tolist() for row in self.numbers[NUM_LINE:].reshape(3, LONGEST))
        tokens, guesses, reached, chance = 1.0, 0.0, 1.0, 1.0
        found = [(tokens, guesses)]
        for depth in range(LONGEST):
            if not tried[depth]:
                break
            share = kept[depth - 1] / tried[depth - 1] if depth else 1.0  # of steps whose guess above was kept
            weight = inherited if depth else 0.0
            trials = share * tried[depth] + weight
            chance = min(1.0, (kept[depth] + weight * chance) / trials) if trials else 0.0
            reached *= chance
            tokens += reached
            guesses += made[depth] / tried[depth]
            found.append((tokens, guesses))
        return found


def step_sums(guessed: Sequence[int], seconds: float, allowed: int, accepted: Sequence[int]) -> Sums:
    """Return one step as sums: guesses by slot, its wall time, guesses allowed, guesses accepted by slot."""
    count, guesses = len(guessed), sum(guessed) / len(guessed)
    numbers = [1.0, guesses, guesses**2, seconds, guesses * seconds]
    depths, none = range(min(allowed, LONGEST)), [0.0] * (LONGEST - allowed)
    numbers += [1.0] * len(depths) + none
    numbers += [sum(n > depth for n in guessed) / count for depth in depths] + none
    numbers += [sum(n > depth for n in accepted) / count for depth in depths] + none
    return Sums(np.array(numbers))


@dataclass
class Measured:
    """Measurements of one drafter in one regime."""

    recent: Sums = field(default_factory=Sums)
    usual: Sums = field(default_factory=Sums)
    steps: int = 0
    """Number of steps that are behind these measurements, borrowed ones included."""
    own: int = 0
    """Number of steps that were measured in this regime, in this run or an earlier one."""
    since_s: float = 0.0
    """Seconds that other drafters have decoded in this regime since its last step."""
    idle: int = 0
    """Number of those steps."""
    wait: int = LOOK_EVERY
    """Number of such steps after which it is looked at whatever that costs; doubled each time."""
    per_call: int = 1
    """Number of steps that its last native call made; a look takes as many."""
    is_warm: bool = False
    """Whether it was used before. The first step may lay out weights, so its time is not counted."""
    short: int = 0
    """Number of steps since it was last asked for the longest draft."""
    patience: int = LOOK_EVERY
    """Number of short steps before it is asked for the longest draft again."""
    _mixed: Sums | None = field(default=None, init=False)

    @property
    def mixed(self) -> Sums:
        """Return what is believed now: recent steps, and usual ones for a few."""
        if self._mixed is None:
            self._mixed = self.recent.plus(self.usual.at_most(PRIOR))
        return self._mixed

    def expected(self) -> list[tuple[float, float]]:
        """Return (E(n), g) by n; the more is known of the drafter, the less a depth inherits from the one above."""
        known = max(PRIOR, self.usual.weight)
        return self.mixed.expected(INHERITED * PRIOR / known)

    def record(self, guessed: Sequence[int], seconds: float, allowed: int, accepted: Sequence[int]) -> None:
        """Add a step: guesses by slot, its wall time in seconds, guesses allowed, guesses accepted by slot."""
        guesses = sum(guessed) / len(guessed)
        if self.steps and self.mixed.foretells(guesses):
            expected = self.mixed.seconds(guesses)
            if expected > WAS_BUSY * seconds:
                factor = WAS_BUSY * seconds / expected
                self.recent = self.recent.with_seconds_times(factor)
                self.usual = self.usual.with_seconds_times(factor)
            seconds = min(seconds, BUSY * expected)
        step = step_sums(guessed, seconds, allowed, accepted)
        self.recent = self.recent.times(FORGET).plus(step)
        self.usual = self.usual.times(FORGET_USUAL).plus(step)
        self._mixed = None
        self.steps += 1
        self.own += 1
        self.since_s, self.idle = 0.0, 0
        self.short = 0 if allowed >= LONGEST else self.short + 1

    def pause(self, seconds: float, steps: int = 1) -> None:
        """Count steps that another drafter made in so many seconds."""
        self.recent, self._mixed = self.recent.times(FORGET**steps), None
        self.since_s += seconds
        self.idle += steps

    def lent(self, weight: float) -> Measured:
        """Return these measurements with a small weight, as the start in another regime."""
        return Measured(usual=self.mixed.at_most(weight), steps=self.steps, is_warm=True, per_call=self.per_call)

    def seconds(self, guesses: float) -> float:
        """Return t(n) in seconds."""
        return self.mixed.seconds(guesses)

    def tokens(self, guesses: int) -> float:
        """Return E(n)."""
        found = self.expected()
        return found[min(guesses, len(found) - 1)][0]

    def guesses(self, allowed: int) -> float:
        """Return how many guesses a step makes in the mean where so many are allowed."""
        found = self.expected()
        return found[allowed][1] if allowed < len(found) else found[-1][1] + allowed - len(found) + 1

    def is_forgotten(self) -> bool:
        """Return whether it was idle for so long that one guess is worth a look, whatever it seemed to cost; the wait
        doubles.
        """
        if self.idle < self.wait:
            return False
        self.wait *= 2
        return True

    def is_due(self, guesses: int, room: int) -> bool:
        """Return whether to ask for the longest draft in place of ``guesses``; each time it was in vain the wait
        doubles.
        """
        if guesses == LONGEST:
            self.patience = LOOK_EVERY
        if self.short < self.patience or room < LONGEST:
            return False
        self.patience = min(2 * self.patience, LONGEST_WAIT)
        return True

    def best(self) -> tuple[int, float]:
        """Return (n, tokens per second) with the highest rate, n >= 1."""
        sums = self.mixed
        found = self.expected()[1:] or [(1.0, 1.0)]
        rates = [(n, tokens / sums.seconds(guesses)) for n, (tokens, guesses) in enumerate(found, 1)]
        return max(rates, key=lambda pair: pair[1])

    @property
    def rate(self) -> float:
        """Return the highest rate, without guesses where there never were any."""
        return self.best()[1] if len(self.expected()) > 1 else 1 / self.seconds(0)

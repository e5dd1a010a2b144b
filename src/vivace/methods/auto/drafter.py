"""``auto``: measures drafters while decoding, drafts only as far as it pays, and reports why.

For every drafter and every number of guesses n, the rate of a step is ``E(n) / t(n)`` tokens per second. Here ``E(n) =
1 + sum_{i<=n} p_i`` is its expected number of tokens, p_i the share of steps in which the guess at depth i was
accepted, and t(n) the wall time of a step, ``a + b g`` fitted to steps measured on this machine. g is the number of
guesses that are made where n are allowed: a drafter that is not sure makes fewer. Old steps lose weight, so a drafter
that becomes slow or wrong is dropped while it runs. The drafter in use is asked for its longest draft from time to
time, to see whether more guesses are accepted, or cost less, than at the last look. Drafting nothing is one of the
choices: on a busy machine or a difficult text it is the fastest.

Measurements are kept per batch size, since steps of 8 sequences cost more than steps of one, and they outlive a
request: an ``Adaptive`` is made once per model, and all its sessions measure for it. Batches shrink as their answers
end, and measuring anew at every size would cost more than it gains. So a new size starts from the measurements of a
similar one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vivace.core.cache import KVCache
from vivace.core.seams import Context, Decided, Draft, Drafter, DraftState, TargetPass, Traversal, Verdict
from vivace.decode.plain import NoDrafts

FORGET = 0.97
"""Factor on the weight of a measurement with each further step."""
FORGET_IDLE = 0.8
"""The same factor for steps in which the drafter was not used: a slow step on a busy machine must not exclude it for
long."""
PROBE_EVERY = 32
"""Steps after which a drafter that is not in use is measured again; doubled each time it was not the best."""
LONGEST_WAIT = 512
"""Largest number of such steps."""
PROBES = (8, 1, 4, 2)
"""Numbers of guesses while a drafter is measured: they differ, so that the cost of one guess shows."""
LONGEST = max(PROBES)
"""Largest number of guesses considered."""
MARGIN = 1.03
"""Factor by which drafting must be faster than not drafting."""
NEAR = 2
"""Batch sizes within this factor share measurements."""
BORROWED = 4.0
"""Number of steps for which measurements of another batch size count."""


@dataclass
class Measured:
    """Measurements of one drafter at one batch size: decayed sums for a least-squares line, and of acceptance."""

    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0
    tried: list[float] = field(default_factory=lambda: [0.0] * LONGEST)
    made: list[float] = field(default_factory=lambda: [0.0] * LONGEST)
    """By depth: how often there was a guess where one was allowed; drafters that are not sure make fewer."""
    kept: list[float] = field(default_factory=lambda: [0.0] * LONGEST)
    is_warm: bool = False
    """Whether it was used before. The first step may lay out weights, so its time is not counted."""
    steps: int = 0
    idle: int = 0
    """Number of steps since it was last used."""
    wait: int = PROBE_EVERY
    """Number of idle steps before it is measured again."""
    own: int = 0
    """How many of the steps were measured at this batch size."""
    short: int = 0
    """Number of steps since it was last asked for the longest draft."""
    patience: int = PROBE_EVERY
    """Number of short steps before it is asked for the longest draft again."""

    def record(self, guessed: Sequence[int], seconds: float, allowed: int, accepted: Sequence[int]) -> None:
        """Add a step: guesses per slot, its wall time in seconds, guesses allowed, guesses accepted per slot."""
        guesses = sum(guessed) / len(guessed)
        kept = FORGET if self.idle <= 1 else FORGET_IDLE**self.idle  # depths that were not tried lose weight as well
        for name, value in (("weight", 1.0), ("n", guesses), ("nn", guesses**2), ("t", seconds)):
            setattr(self, name, kept * getattr(self, name) + value)
        self.nt = kept * self.nt + guesses * seconds
        self.tried = [kept * count for count in self.tried]
        self.made = [kept * count for count in self.made]
        self.kept = [kept * count for count in self.kept]
        for depth in range(allowed):
            self.tried[depth] += 1
            self.made[depth] += sum(count > depth for count in guessed) / len(guessed)
            self.kept[depth] += sum(count > depth for count in accepted) / len(accepted)
        self.steps += 1
        self.own += 1
        self.idle = 0
        self.short = 0 if allowed == LONGEST else self.short + 1

    def borrowed(self) -> Measured:
        """Return these measurements with a small weight, as the start for another batch size."""
        share = min(1.0, BORROWED / self.weight)
        return Measured(
            weight=share * self.weight,
            n=share * self.n,
            nn=share * self.nn,
            t=share * self.t,
            nt=share * self.nt,
            tried=[share * count for count in self.tried],
            made=[share * count for count in self.made],
            kept=[share * count for count in self.kept],
            is_warm=True,
            steps=self.steps,
        )

    def seconds(self, guesses: float) -> float:
        """Return t(n) in seconds: the fitted line, constant while only one n has been seen."""
        spread = self.weight * self.nn - self.n**2
        slope = (self.weight * self.nt - self.n * self.t) / spread if spread > 1e-9 else 0.0
        slope = max(slope, 0.0)
        return (self.t - slope * self.n) / self.weight + slope * guesses

    def tokens(self, guesses: int) -> float:
        """Return E(n); depths that were never tried count as never accepted."""
        pairs = zip(self.kept[:guesses], self.tried[:guesses], strict=True)
        return 1 + sum(kept / tried if tried else 0.0 for kept, tried in pairs)

    def guesses(self, allowed: int) -> float:
        """Return how many guesses a step makes in the mean where so many are allowed."""
        pairs = zip(self.made[:allowed], self.tried[:allowed], strict=True)
        return sum(made / tried if tried else 1.0 for made, tried in pairs)

    def is_due(self, guesses: int, room: int) -> bool:
        """Return whether to ask for the longest draft in place of ``guesses``; each time it was in vain the wait
        doubles.
        """
        if guesses == LONGEST:
            self.patience = PROBE_EVERY
        if self.short < self.patience or room < LONGEST:
            return False
        self.patience = min(2 * self.patience, LONGEST_WAIT)
        return True

    def best(self) -> tuple[int, float]:
        """Return (n, tokens per second) with the highest rate, n >= 1."""
        deepest = max(1, sum(tried > 0 for tried in self.tried))
        rates = [(n, self.tokens(n) / self.seconds(self.guesses(n))) for n in range(1, deepest + 1)]
        return max(rates, key=lambda pair: pair[1])


@dataclass(frozen=True)
class DraftChoice:
    """What a step does, and why."""

    drafter: int
    """Index of the drafter; 0 drafts nothing."""
    guesses: int
    reason: str


class Adaptive:
    """Implements ``Drafter``: measures a model's drafters and chooses the fastest for each step."""

    name = "auto"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        plain: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Choose among ``drafters`` and ``plain``, which drafts nothing."""
        self.drafters: tuple[Drafter, ...] = (NoDrafts() if plain is None else plain, *drafters)
        self.clock = clock
        self._measured: dict[tuple[int, int], Measured] = {}

    @property
    def leaves_all_entries(self) -> bool:
        """Whether all drafters do."""
        return all(drafter.leaves_all_entries for drafter in self.drafters)

    def text_bytes(self, entries: int) -> int:
        """Return the sum over all drafters, since each of them follows every text."""
        return sum(drafter.text_bytes(entries) for drafter in self.drafters)

    def open(self, cache: KVCache) -> AdaptiveState:
        """Return the state of a session, which holds a state of every drafter: all of them follow every text."""
        return AdaptiveState(self, [drafter.open(cache) for drafter in self.drafters])

    def choose(self, batch: int, room: int) -> DraftChoice:
        """Return what to do in a step of ``batch`` sequences in which at most ``room`` guesses can be used."""
        if len(self.drafters) == 1 or room == 0:
            return DraftChoice(0, 0, "nothing to draft with" if room else "the last token needs no draft")
        arms = self._arms(batch)
        for index, arm in enumerate(arms):
            arm.idle += 1
            if arm.steps < len(PROBES) or arm.idle > arm.wait:
                arm.wait = min(2 * arm.wait, LONGEST_WAIT) if arm.steps >= len(PROBES) else PROBE_EVERY
                guesses = PROBES[arm.steps % len(PROBES)] if index else 0
                return DraftChoice(index, guesses, f"measuring {self.drafters[index].name}")
        plain = 1 / arms[0].seconds(0)
        index, (guesses, rate) = max(((i, arm.best()) for i, arm in enumerate(arms) if i), key=lambda pair: pair[1][1])
        name = self.drafters[index].name
        gain = rate / plain
        arms[index if gain >= MARGIN else 0].wait = PROBE_EVERY
        if gain < MARGIN:
            return DraftChoice(0, 0, f"{name} would give {gain:.2f}x plain at batch {batch}: not drafting")
        if arms[index].is_due(guesses, room):
            return DraftChoice(index, LONGEST, f"measuring {name}")
        return DraftChoice(index, guesses, f"{name} with {guesses} guesses gives {gain:.2f}x plain at batch {batch}")

    def _arms(self, batch: int) -> list[Measured]:
        """Return the measurements of every drafter at this batch size."""
        every = range(len(self.drafters))
        if any((batch, index) not in self._measured for index in every):
            near = self._nearest(batch)
            for index in every:
                begun = Measured() if near is None else self._measured[near, index].borrowed()
                self._measured.setdefault((batch, index), begun)
        return [self._measured[batch, index] for index in every]

    def _nearest(self, batch: int) -> int | None:
        """Return the nearest batch size at which all drafters were measured; None where none is within ``NEAR``."""
        near: dict[int, float] = {}
        for other in {other for other, _ in self._measured}:
            arms = [self._measured.get((other, index)) for index in range(len(self.drafters))]
            ratio = max(other, batch) / min(other, batch)
            if ratio <= NEAR and all(arm is not None and arm.own >= len(PROBES) for arm in arms):
                near[other] = ratio
        return min(near, key=near.__getitem__, default=None)

    def record(self, batch: int, drafter: int, elapsed: float, allowed: int, verdict: Verdict) -> None:
        """Add a step to the measurements, or all steps that were made in one native call.

        Args:
            batch: number of sequences.
            drafter: index of the drafter.
            elapsed: seconds from the choice to the verdict.
            allowed: largest number of guesses per sequence.
            verdict: what was drafted and accepted.
        """
        arm = self._measured.setdefault((batch, drafter), Measured())
        if not arm.is_warm:
            arm.is_warm = True
            return
        count = max(map(len, verdict.steps))
        for place in range(count):
            made = [steps[place] for steps in verdict.steps if place < len(steps)]
            guessed = [len(step.guessed) for step in made]
            arm.record(guessed, elapsed / count, allowed, [step.kept - 1 for step in made])


class AdaptiveState:
    """Implements ``DraftState``: holds a state of every drafter, one of which drafts in each step."""

    def __init__(self, adaptive: Adaptive, states: Sequence[DraftState]) -> None:
        """Choose among ``states``, in the order of the drafters of ``adaptive``."""
        self.choice = DraftChoice(0, 0, "nothing measured yet")
        self.traversal: Traversal = states[0].traversal
        self._adaptive = adaptive
        self._states = tuple(states)
        self._started = 0.0
        self._batch = 1
        self._allowed = 0

    @property
    def reason(self) -> str:
        """Return why the last step drafted as it did."""
        return self.choice.reason

    def propose(self, context: Context) -> Draft | Decided:
        """Return the proposal of the drafter chosen for this batch size."""
        self._started = self._adaptive.clock()
        self._batch = len(context.slots)
        room = max(context.max_nodes.values(), default=LONGEST)
        self.choice = self._adaptive.choose(self._batch, room)
        self._allowed = min(self.choice.guesses, room)
        if self.choice.drafter:
            capped = {slot: min(nodes, self.choice.guesses) for slot, nodes in context.max_nodes.items()}
            context = replace(context, max_nodes=capped)
        return self._states[self.choice.drafter].propose(context)

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Pass the observation to every drafter, then add the step to the measurements."""
        for state in self._states:
            state.observe(draft, passed, verdict)
        if verdict is not None:
            elapsed, allowed = self._adaptive.clock() - self._started, min(self._allowed, LONGEST)
            self._adaptive.record(self._batch, self.choice.drafter, elapsed, allowed, verdict)

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Let every drafter have room."""
        for state in self._states:
            state.extend(slots, stops)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Tell every drafter."""
        for state in self._states:
            state.fork(sources, targets)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Pass the call to every drafter."""
        for state in self._states:
            state.commit(slots, paths)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Pass the call to every drafter."""
        for state in self._states:
            state.truncate(slots, lengths)

    def release(self, slots: Sequence[int]) -> None:
        """Pass the call to every drafter."""
        for state in self._states:
            state.release(slots)

    def saved(self) -> object:
        """Return what every drafter has saved."""
        return [state.saved() for state in self._states]

    def restore(self, saved: object) -> None:
        """Restore every drafter."""
        assert isinstance(saved, list)
        for state, own in zip(self._states, saved, strict=True):
            state.restore(own)

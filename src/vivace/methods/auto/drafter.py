"""``auto``: measures drafters while decoding, drafts only as far as it pays, and reports why.

``measured.py`` has what is known of a drafter: the rate of its steps, by how many guesses are allowed. The drafter with
the highest rate drafts, as far as its rate grows. Drafting nothing is one of the choices: on a busy machine or a
difficult text it is the fastest.

Whoever is not in use must be looked at again now and then, since texts and machines change. A look costs what the best
drafter would have decoded meanwhile. Each other drafter may cost ``EXPLORE`` of the time so: a drafter that is nearly
as fast is looked at often, one that takes ten times as long for a token hardly ever: after 32 steps, 64, 128 and so
on, in case the machine was busy when it was measured. The drafter in use is asked for its longest draft from time to
time, to see whether more guesses are accepted, or cost less, than at the last look.

Measurements are kept by *regime*: the number of sequences, whether tokens are drawn, and how long the texts are, since
each of these changes what a step costs. They outlive a request: an ``Adaptive`` is made once per model, and all its
sessions measure for it. They outlive the process, too, where there is a file for them (``memory.py``). Batches shrink
as their answers end and texts grow, and measuring anew each time would cost more than it gains. So a new regime starts
from the measurements of a similar one.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vivace.core.cache import KVCache
from vivace.core.seams import Context, Decided, Draft, Drafter, DraftState, TargetPass, Traversal, Verdict
from vivace.decode.plain import NoDrafts
from vivace.methods.auto.measured import LONGEST, LOOK_EVERY, Measured
from vivace.methods.auto.memory import KeptMeasurements
from vivace.methods.auto.regime import Regime, nearest, regime_of

FIRST = (8, 2, 8)
"""Numbers of guesses while a drafter is measured for the first time: they differ, so that the cost of one shows."""
FIRST_PLAIN = 2
"""Number of steps in which plain decoding is measured for the first time."""
EXPLORE = 0.003
"""Share of the time that looking again at one drafter may cost."""
LEAST_LOSS = 0.1
"""A look is counted as costing at least this share of the time it takes."""
LONGEST_EVERY = 4
"""Of so many looks at a drafter one asks for its longest draft, the others for its best."""
MARGIN = 1.03
"""Factor by which drafting must be faster than not drafting."""
BORROWED = 4.0
"""Number of steps for which measurements of another regime count."""
SAVE_STEPS = 16
"""What was measured is kept in a file when a text ends and at least so many steps are new, and at the process' end."""
SAVE_EVERY_S = 5.0
"""Least number of seconds between two writes of the file, unless the process ends."""


@dataclass(frozen=True)
class DraftChoice:
    """What a step does, and why."""

    drafter: int
    """Index of the drafter; 0 drafts nothing."""
    guesses: int
    reason: str | None
    """For users; None where there was nothing to choose."""


class Adaptive:
    """Implements ``Drafter``: measures a model's drafters and chooses the fastest for each step."""

    name = "auto"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        plain: Drafter | None = None,
        memory: KeptMeasurements | None = None,
        weights: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Choose among ``drafters`` and ``plain``, which drafts nothing.

        Args:
            drafters: what may draft.
            plain: plain decoding.
            memory: keeps measurements between runs.
            weights: fingerprints of the weights that drafters have beside the model's, by name: others of the same
                method have measurements of their own.
            clock: returns seconds.
        """
        self.drafters: tuple[Drafter, ...] = (NoDrafts() if plain is None else plain, *drafters)
        self.memory = memory
        self.clock = clock
        self._labels = [label_of(drafter, (weights or {}).get(drafter.name, "")) for drafter in self.drafters]
        self._measured: dict[tuple[Regime, int], Measured] = {}
        self._unsaved = 0
        self._saved_at: float | None = None
        if memory is not None:
            self._recall(memory)
            atexit.register(_keep_last, weakref.ref(self))

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

    def choose(self, regime: Regime, room: int) -> DraftChoice:
        """Return what to do in a step of this regime in which at most ``room`` guesses can be used."""
        if len(self.drafters) == 1:
            return DraftChoice(0, 0, "nothing to draft with")
        if room == 0:
            return DraftChoice(0, 0, None)  # the last token needs no guesses
        arms = self._arms(regime)
        for index, arm in enumerate(arms):
            if arm.steps < (len(FIRST) if index else FIRST_PLAIN):
                return self._look(index, FIRST[arm.steps] if index else 0)
        plain = 1 / arms[0].seconds(0)
        bests = [(0, plain), *(arm.best() for arm in arms[1:])]
        index = max(range(1, len(arms)), key=lambda i: bests[i][1])
        guesses, rate = bests[index]
        gain = rate / plain
        used = index if gain >= MARGIN else 0
        for other, arm in enumerate(arms):
            count, own = bests[other]
            if other and arm.steps % LONGEST_EVERY == 0:
                count = LONGEST
            took = arm.per_call * arm.seconds(arm.guesses(count))
            loss = took * max(LEAST_LOSS, 1 - own / bests[used][1])
            if other == used:
                arm.wait = LOOK_EVERY
            elif EXPLORE * arm.since_s >= loss:
                return self._look(other, count)
            elif other and arm.is_forgotten():
                return self._look(other, 1)
        name = self.drafters[index].name
        if not used:
            return DraftChoice(0, 0, f"{name} would give {gain:.2f}x plain at batch {regime.batch}: not drafting")
        if arms[index].is_due(guesses, room):
            return self._look(index, LONGEST)
        return DraftChoice(index, guesses, f"{name} with {guesses} guesses gives {gain:.2f}x plain at {regime.label}")

    def _look(self, index: int, guesses: int) -> DraftChoice:
        return DraftChoice(index, guesses, f"measuring {self.drafters[index].name}")

    def _arms(self, regime: Regime) -> list[Measured]:
        """Return the measurements of every drafter in this regime."""
        every = range(len(self.drafters))
        if any((regime, index) not in self._measured for index in every):
            similar = nearest(regime, [other for other in self._regimes() if self._is_measured(other)])
            for index in every:
                begun = Measured() if similar is None else self._measured[similar, index].lent(BORROWED)
                self._measured.setdefault((regime, index), begun)
        return [self._measured[regime, index] for index in every]

    def _regimes(self) -> list[Regime]:
        return list(dict.fromkeys(regime for regime, _ in self._measured))

    def _is_measured(self, regime: Regime) -> bool:
        """Return whether every drafter has been measured in this regime itself; what is borrowed is not lent on."""
        arms = [self._measured.get((regime, index)) for index in range(len(self.drafters))]
        return all(arm is not None and arm.own >= FIRST_PLAIN for arm in arms)

    def record(self, regime: Regime, drafter: int, elapsed: float, allowed: int, verdict: Verdict) -> None:
        """Add a step to the measurements, or all steps that were made in one native call.

        Args:
            regime: of the step.
            drafter: index of the drafter.
            elapsed: seconds from the choice to the verdict.
            allowed: largest number of guesses per sequence.
            verdict: what was drafted and accepted.
        """
        arm = self._measured.setdefault((regime, drafter), Measured())
        if not arm.is_warm:
            arm.is_warm = True
            return
        count = arm.per_call = max(map(len, verdict.steps))
        for place in range(count):
            made = [steps[place] for steps in verdict.steps if place < len(steps)]
            guessed = [len(step.guessed) for step in made]
            arm.record(guessed, elapsed / count, allowed, [step.kept - 1 for step in made])
        for other in range(len(self.drafters)):
            if other != drafter and (regime, other) in self._measured:
                self._measured[regime, other].pause(elapsed, count)
        self._unsaved += count

    def _recall(self, memory: KeptMeasurements) -> None:
        """Begin with what earlier runs have measured."""
        for regime, found in memory.read().items():
            for index, label in enumerate(self._labels):
                if label in found:
                    usual, steps = found[label]
                    self._measured[regime, index] = Measured(usual=usual, steps=steps, own=steps)

    def keep(self, *, is_last: bool = False) -> None:
        """Write what was measured to the file, where there is one and enough is new.

        Args:
            is_last: whether the process ends; then anything new is enough, as a process may answer one short text.
        """
        now = self.clock()
        is_early = self._saved_at is not None and now - self._saved_at < SAVE_EVERY_S
        is_due = self._unsaved > 0 if is_last else self._unsaved >= SAVE_STEPS and not is_early
        if self.memory is None or not is_due:
            return
        kept = {
            regime: {
                label: (arm.usual, arm.steps)
                for index, label in enumerate(self._labels)
                if (arm := self._measured.get((regime, index))) is not None and arm.own
            }
            for regime in self._regimes()
        }
        if self.memory.write({regime: arms for regime, arms in kept.items() if arms}):
            self._unsaved, self._saved_at = 0, now


def _keep_last(adaptive: weakref.ref[Adaptive]) -> None:
    """Write what was measured since the last write, as the process ends."""
    if (found := adaptive()) is not None:
        found.keep(is_last=True)


def label_of(drafter: Drafter, weights: str = "") -> str:
    """Return the name of a drafter with the plan that it drafts by and a fingerprint of its weights: with others it has
    other measurements.
    """
    plan = getattr(drafter, "plan", None)
    label = drafter.name if plan is None else f"{drafter.name}, {plan.label}"
    return f"{label} ({weights})" if weights else label


class AdaptiveState:
    """Implements ``DraftState``: holds a state of every drafter, one of which drafts in each step."""

    def __init__(self, adaptive: Adaptive, states: Sequence[DraftState]) -> None:
        """Choose among ``states``, in the order of the drafters of ``adaptive``."""
        self.choice = DraftChoice(0, 0, "nothing measured yet")
        self.traversal: Traversal = states[0].traversal
        self._adaptive = adaptive
        self._states = tuple(states)
        self._started = 0.0
        self._regime = Regime(1)
        self._allowed = 0

    @property
    def reason(self) -> str | None:
        """Return why the last step drafted as it did; None for the last token of a text."""
        return self.choice.reason

    def propose(self, context: Context) -> Draft | Decided:
        """Return the proposal of the drafter chosen for this regime."""
        self._started = self._adaptive.clock()
        self._regime = regime_of(context)
        room = max(context.max_nodes.values(), default=LONGEST)
        self.choice = self._adaptive.choose(self._regime, room)
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
            self._adaptive.record(self._regime, self.choice.drafter, elapsed, allowed, verdict)

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
        self._adaptive.keep()

    def saved(self) -> object:
        """Return what every drafter has saved."""
        return [state.saved() for state in self._states]

    def restore(self, saved: object) -> None:
        """Restore every drafter."""
        assert isinstance(saved, list)
        for state, own in zip(self._states, saved, strict=True):
            state.restore(own)

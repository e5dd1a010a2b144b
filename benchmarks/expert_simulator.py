"""Loading experts on hardware that is not here: a discrete-event simulator fed by recorded traces.

Two resources: the processor, which runs layers in order, and one channel of given bandwidth, which takes the most
urgent load first and lets a demand go before a guess at the next chunk, as the expert cache does. A trace says
what routers chose and what was predicted when (``expert_traces.py``); the policies are the same objects that the cache
asks.

Times: a layer takes ``layer_s`` before its experts are known (attention, router) and ``expert_s`` for each of them. A
load takes ``latency_s + bytes / bandwidth``; the latency passes while other loads are on the channel.

Bound: with T_c the compute and T_l the loads of the baseline, T_l' those of a policy, no policy is faster than the
baseline by more than (T_l + T_c) / max(T_l', T_c), which is at most 2 where T_l' = T_l.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from benchmarks.expert_throttle import Throttle
from benchmarks.expert_traces import Prediction, ReusePrediction, Trace, Visit
from vivace.errors import ConfigError
from vivace.storage.experts.policy import Key, Policy


@dataclass(frozen=True)
class Machine:
    """The hardware that is simulated: a channel, fast memory and a processor."""

    bytes_per_s: float
    """Bandwidth of the channel; ``inf`` is a channel that takes no time."""
    expert_bytes: int
    num_slots: int
    """Experts in fast memory at once."""
    layer_s: float
    """Seconds that a layer takes until its experts are known."""
    expert_s: float
    """Seconds that one expert takes."""
    latency_s: float = 15e-6
    """Seconds from the request to the first byte."""
    chunk_bytes: int = 256 * 1024
    """Bytes after which a more urgent load may go first."""
    throttled_to: float = inf
    """Bytes a second to which a group of control holds the channel, as the kernel counts them."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.expert_bytes < 1 or self.num_slots < 1 or self.chunk_bytes < 1:
            raise ConfigError(
                "bandwidth, expert_bytes, num_slots and chunk_bytes must be positive, found "
                f"{self.bytes_per_s:g}, {self.expert_bytes}, {self.num_slots} and {self.chunk_bytes}"
            )
        if min(self.layer_s, self.expert_s, self.latency_s) < 0:
            raise ConfigError(f"times must be >= 0, found {self.layer_s}, {self.expert_s} and {self.latency_s}")


@dataclass
class Simulated:
    """What the decoded tokens of a trace took.

    Prompts are run, since they fill the slots, and not counted, nor is an answer's first pass, whose token is the
    prompt's.
    """

    num_passes: int
    total_s: float = 0.0
    compute_s: float = 0.0
    channel_s: float = 0.0
    """Seconds that the channel was busy."""
    hits: int = 0
    prefetched: int = 0
    late: int = 0
    misses: int = 0
    loads: int = 0
    wasted: int = 0
    """Loads whose expert was never used."""

    @property
    def pass_s(self) -> float:
        """Mean seconds of a pass."""
        return self.total_s / max(1, self.num_passes)

    @property
    def uses(self) -> int:
        """Number of chosen experts."""
        return self.hits + self.prefetched + self.late + self.misses

    def bound(self, baseline: Simulated) -> float:
        """Return how many times as fast as a baseline any order of this policy's loads could be."""
        return (baseline.channel_s + baseline.compute_s) / max(self.channel_s, self.compute_s, 1e-12)


@dataclass(eq=False)
class _Load:
    key: Key
    left: int
    asked: float
    is_prefetch: bool
    outcome: Simulated
    """The totals of the pass that ran when the load began."""
    is_ready: bool = False


@dataclass
class _State:
    now: float = 0.0
    clock: int = -1
    slots: dict[Key, _Load] = field(default_factory=dict)
    likely: dict[Key, tuple[int, int]] = field(default_factory=dict)
    queue: list[tuple[int, int, int, _Load]] = field(default_factory=list)
    """Loads under way, as (due, rank, number, load)."""
    held: set[Key] = field(default_factory=set)
    channel: float = 0.0
    """Time at which the channel is free."""


def simulate(trace: Trace, policy: Policy, machine: Machine, *, guesses: bool = True, warm_up: int = 0) -> Simulated:
    """Run a trace.

    Args:
        trace: what was chosen and predicted.
        policy: what stays and what comes early; used up by this run.
        machine: how fast things are.
        guesses: whether the trace's predictions reach the policy; a baseline on demand gets none.
        warm_up: answers that only fill the slots.
    """
    return _Run(trace, policy, machine, warm_up).run(guesses=guesses)


class _Run:
    def __init__(self, trace: Trace, policy: Policy, machine: Machine, warm_up: int) -> None:
        self.trace, self.policy, self.machine = trace, policy, machine
        self.state = _State()
        self._counted = set(_decoded(trace, warm_up))
        self.outcome, self._others = Simulated(len(self._counted)), Simulated(0)
        self._number = 0
        self._throttle = None if machine.throttled_to == inf else Throttle(machine.throttled_to)

    def run(self, *, guesses: bool) -> Simulated:
        """Run all visits in order."""
        said: list[Prediction | ReusePrediction] = [*self.trace.reuses, *self.trace.predictions] if guesses else []
        words = iter(sorted(said, key=lambda each: each.issued))
        told = next(words, None)
        for visit in self.trace.visits:
            while told is not None and told.issued < visit.clock:
                self._hear(told)
                told = next(words, None)
            self._run(visit)
        for load in self.state.slots.values():
            load.outcome.wasted += load.is_prefetch
        return self.outcome

    def _run(self, visit: Visit) -> None:
        """Run one layer, and count it if its pass is one that counts."""
        counted, begun = self.outcome, self.state.now
        if visit.clock // self.trace.num_layers not in self._counted:
            self.outcome = self._others
        self._compute(self.machine.layer_s)
        self._visit(visit)
        self.outcome.total_s += self.state.now - begun
        self.outcome = counted

    def _hear(self, told: Prediction | ReusePrediction) -> None:
        if isinstance(told, ReusePrediction):
            self.policy.reuse_predicted(told.layer, told.passes, told.turn)
            return
        layer, likely = told.due % self.trace.num_layers, self.state.likely
        for key in [key for key, (due, _) in likely.items() if due == told.due and key[1] not in told.likely]:
            del likely[key]
        self._reschedule(
            told.due + self.trace.num_layers, lambda due, key: due == told.due and key[1] not in told.likely
        )
        self.policy.predicted(layer, told.likely, told.due)
        for rank, expert in enumerate(told.likely):
            self._want((layer, expert), told.due, rank)

    def _want(self, key: Key, due: int, rank: int) -> None:
        load = self.state.slots.get(key)
        if load is not None and not load.is_ready:
            self._reschedule(due, lambda was, other: other == key and was > due)
        elif load is None and due > self.state.clock:
            self.state.likely[key] = min(self.state.likely.get(key, (due, rank)), (due, rank))

    def _visit(self, visit: Visit) -> None:
        state = self.state
        state.clock = visit.clock
        keys = visit.keys(self.trace.num_layers)
        self.policy.used(visit.clock % self.trace.num_layers, visit.chosen, visit.clock, is_prompt=visit.is_prompt)
        for rank, (key, due) in enumerate(self.policy.prefetches(visit.clock)):
            self._want(key, due, rank)
        state.likely = {key: due for key, due in state.likely.items() if due[0] > visit.clock}
        state.held = set(keys)
        later = visit.clock + self.trace.num_layers
        self._reschedule(visit.clock, lambda due, key: due > visit.clock and key in state.held)
        self._reschedule(later, lambda due, key: due <= visit.clock and key not in state.held)
        for key in keys:
            self._count(state.slots.get(key))
        left = list(keys)
        while left:
            for key in left:
                if key not in state.slots and self._room(None):
                    self._start(key, (visit.clock, -1), is_prefetch=False)
            ready = next((key for key in left if key in state.slots and state.slots[key].is_ready), None)
            if ready is None:
                state.now = max(state.now, self._turn())
                continue
            self._compute(self.machine.expert_s)
            left.remove(ready)
            state.held.discard(ready)
        if not self.policy.keeps:
            for key in keys:
                state.slots.pop(key, None)

    def _reschedule(self, due: int, which: Callable[[int, Key], bool]) -> None:
        """Change when loads under way are due."""
        queue = self.state.queue
        queue[:] = [(due if which(was, load.key) else was, rank, number, load) for was, rank, number, load in queue]
        heapq.heapify(queue)

    def _count(self, load: _Load | None) -> None:
        outcome = self.outcome
        if load is None:
            outcome.misses += 1
        elif not load.is_ready:
            outcome.late += 1
        elif load.is_prefetch:
            outcome.prefetched += 1
        else:
            outcome.hits += 1
        if load is not None:
            load.is_prefetch = False

    def _compute(self, seconds: float) -> None:
        """Let the processor work for some seconds, and the channel beside it."""
        until = self.state.now + seconds
        self.outcome.compute_s += seconds
        while self._has_work() and self.state.channel < until:
            self._turn()
        self.state.now = until

    def _has_work(self) -> bool:
        state = self.state
        if not state.queue and state.likely:
            key = min(state.likely, key=state.likely.__getitem__)
            due = state.likely[key]
            if self._room(due[0]):
                self._start(key, due, is_prefetch=True)
        return bool(state.queue)

    def _turn(self) -> float:
        """Move one chunk of the most urgent load, and return when that is done."""
        state, machine = self.state, self.machine
        assert state.queue, "nobody waits for a load that is not there"
        load = state.queue[0][-1]
        size = min(load.left, machine.chunk_bytes)
        begun = max(state.channel, load.asked + machine.latency_s)
        if self._throttle is not None:
            begun = self._throttle.leave(begun, size)
        taken = size / machine.bytes_per_s
        state.channel = begun + taken
        load.outcome.channel_s += taken
        load.left -= size
        if not load.left:
            heapq.heappop(state.queue)
            load.is_ready = True
        return state.channel

    def _start(self, key: Key, urgency: tuple[int, int], *, is_prefetch: bool) -> None:
        state = self.state
        asked = max(state.now, state.channel - self.machine.latency_s) if is_prefetch else state.now
        load = _Load(key, self.machine.expert_bytes, asked, is_prefetch, self.outcome)
        self._number += 1
        state.slots[key] = load
        state.likely.pop(key, None)
        heapq.heappush(state.queue, (*urgency, self._number, load))
        self.outcome.loads += 1

    def _room(self, due: int | None) -> bool:
        """Make room for a load, as ``ExpertCache`` does."""
        state = self.state
        if len(state.slots) < self.machine.num_slots:
            return True
        best, latest = None, -inf if due is None else float(due)
        keys = list(self._evictable())
        for key, use in zip(keys, self.policy.next_uses(keys, state.clock), strict=True):
            if use > latest:
                best, latest = key, use
        if best is None:
            return False
        gone = state.slots.pop(best)
        gone.outcome.wasted += gone.is_prefetch
        return True

    def _evictable(self) -> Iterator[Key]:
        return (key for key, load in self.state.slots.items() if load.is_ready and key not in self.state.held)


def _decoded(trace: Trace, warm_up: int) -> Iterator[int]:
    """Yield the passes that count: those of answers but the first of each, after ``warm_up`` whole answers."""
    prompts: dict[int, bool] = {}
    for visit in trace.visits:
        prompts[visit.clock // trace.num_layers] = visit.is_prompt
    answers, was_prompt = 0, False
    for number, is_prompt in prompts.items():
        answers += is_prompt and not was_prompt
        if not is_prompt and not was_prompt and max(answers, 1) > warm_up:
            yield number
        was_prompt = is_prompt

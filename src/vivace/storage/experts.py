"""Experts that are not all in memory: slots over all layers, filled on demand and ahead of time.

A mixture's router always decides and its experts always run, summed in the router's order (``core/moe.py``), so
answers are those of the resident model, bit for bit, whatever this file does. What it decides is when bytes move.

A channel (``channel.py``) fills slots, the most urgent first: those of a layer that waits, then what is expected, by
when it is due. It is given little more than it can read at once, so that a guess can be thought better of until then.
An expert that is being executed or loaded is never evicted; a guess never evicts what is needed before it, a demand
evicts whatever is needed last. A layer that chooses more experts than there are slots (a prompt chunk) runs in waves,
each expert read once. Where gradients go back through an expert it is asked for once more, since its slot may hold
another by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vivace.core.seams import Expert
from vivace.core.step import Step
from vivace.errors import CapacityError, CheckpointError, VivaceError
from vivace.storage.channel import CHUNK_BYTES, NUM_THREADS, Channel
from vivace.storage.policies import Policy
from vivace.storage.readers import PAGE, aligned
from vivace.storage.traces import Hint, Key, Outlook, Trace, Visit

SORTS = 2
"""How often a pass slots are sorted by who goes first."""

VICTIMS = 64
"""Looked for at first, those to go first; all of them where these run out within a layer."""


class Shelf(Protocol):
    """Where experts lie, each as one bundle of the same size."""

    bundle_bytes: int

    def place(self, key: Key) -> int:
        """Where an expert's bundle begins."""
        ...

    def channel(self, slots: Sequence[memoryview], *, num_threads: int, chunk_bytes: int) -> Channel:
        """What brings bundles into slots."""
        ...

    def expert(self, layer_bytes: Tensor) -> Expert:
        """The feed-forward over a slot's bytes, (bundle_bytes,) uint8; what it computes follows the bytes."""
        ...


@dataclass
class Counts:
    """What happened since the cache was made."""

    resident: int = 0
    """Chosen experts that were there from an earlier use."""
    ahead: int = 0
    """That a guess had brought in time."""
    awaited: int = 0
    """That a guess was still bringing."""
    missed: int = 0
    """That had to be asked for."""
    loads: int = 0
    wasted: int = 0
    """Loads that were evicted, or are there, unused."""
    wait_s: float = 0.0
    """Seconds the model stood still."""

    @property
    def uses(self) -> int:
        """Chosen experts in all."""
        return self.resident + self.ahead + self.awaited + self.missed


@dataclass(eq=False)
class _Slot:
    number: int
    expert: Expert
    key: Key | None = None
    is_ready: bool = False
    is_guess: bool = False
    """Brought by a guess and not used yet."""
    due: int = 0
    """Clock it is loaded for, while it is being loaded."""
    used: int = -1
    """Clock at which its expert was chosen last, or asked for."""
    error: Exception | None = None


class ExpertCache:
    """Slots for experts of all layers; used by one thread at a time."""

    def __init__(
        self,
        shelf: Shelf,
        policy: Policy,
        num_layers: int,
        num_slots: int,
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Allocate the slots and open a channel to the shelf; ``close`` closes it.

        Args:
            shelf: where experts lie.
            policy: what stays and what is loaded early.
            num_layers: of the model.
            num_slots: experts in memory at once.
            num_threads: reads under way at once.
            chunk_bytes: of one read, a multiple of 4096.

        Raises:
            CapacityError: no slot at all.
        """
        if num_slots < 1:
            raise CapacityError(f"{num_slots} slots hold no expert of {shelf.bundle_bytes} bytes; give more memory")
        self.shelf = shelf
        self.policy = policy
        self.num_layers = num_layers
        self.counts = Counts()
        self.trace: Trace | None = None
        """Filled when it is there."""
        memory = _memory(shelf, num_slots)
        experts = (shelf.expert(torch.frombuffer(each, dtype=torch.uint8)) for each in memory)
        self._slots = [_Slot(number, expert) for number, expert in enumerate(experts)]
        self._channel = shelf.channel(memory, num_threads=num_threads, chunk_bytes=chunk_bytes)
        self._most_under_way = max(2, -(-2 * num_threads * chunk_bytes // shelf.bundle_bytes))
        """Guesses wait here, where they can be thought better of, until the channel has this much to do or less."""
        self._empty = self._slots[::-1]
        self._at: dict[Key, _Slot] = {}
        self._loading: dict[int, _Slot] = {}
        self._likely: dict[Key, tuple[int, int]] = {}
        self._expected: dict[int, Sequence[int]] = {}
        """What was said last of a layer."""
        self._held: set[Key] = set()
        self._clock = -1
        self._failed: list[Key] = []
        """Held experts that could not be read."""
        self._victims: list[tuple[float, Key]] = []
        """Whom to evict, the best last."""
        self._sorted_at = -1
        self._is_sorted = self._has_all_victims = False
        self._asked: set[Key] = set()
        """Expected since victims were sorted."""

    @property
    def num_slots(self) -> int:
        """Experts in memory at once."""
        return len(self._slots)

    @property
    def is_idle(self) -> bool:
        """Nothing is being loaded and nothing that is expected could be."""
        self._settle(waits=False)
        self._go_on()
        return not self._loading

    def layer(self, index: int) -> LayerExperts:
        """The experts of one layer, for its mixture."""
        return LayerExperts(self, index)

    def close(self) -> None:
        """Stop loading; no expert can be served any more."""
        self._channel.close()

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Load these before their layer runs, if there is time and room; the likeliest first.

        What was expected of the layer before, and is not any more, is not loaded, and waits where that has begun.
        """
        due = self._turn(layer) * self.num_layers + layer
        if self.trace is not None:
            self.trace.hints.append(Hint(self._clock, due, tuple(likely)))
        self.policy.expected(layer, likely, due)
        for expert in self._expected.get(layer, ()):
            if expert not in likely:
                self._think_better_of((layer, expert), due)
        self._expected[layer] = likely
        for rank, expert in enumerate(likely):
            self._asked.add((layer, expert))
            self._want((layer, expert), due, rank)
        if self._likely:
            self._go_on()

    def _think_better_of(self, key: Key, due: int) -> None:
        self._likely.pop(key, None)
        slot = self._at.get(key)
        if slot is not None and slot.due == due:
            self._reschedule(slot, due + self.num_layers)

    def _reschedule(self, slot: _Slot, due: int) -> None:
        """What is being loaded is due at another time than was thought."""
        if not slot.is_ready:
            slot.due = due
            self._channel.reschedule(slot.number, due)

    def foretell(self, layer: int, passes: Sequence[float]) -> None:
        """After the pass to come, each expert of a layer is thought to be chosen again that many passes later."""
        turn = self._turn(layer)
        if self.trace is not None:
            self.trace.outlooks.append(Outlook(self._clock, layer, turn, tuple(passes)))
        self.policy.foretold(layer, passes, turn)
        self._is_sorted = False

    def serve(self, layer: int, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Each expert that a layer chose once, as it becomes ready.

        Raises:
            CheckpointError: one could not be read; the cache stays usable.
        """
        self._begin(layer, chosen, is_prompt=is_prompt)
        self._held = {(layer, expert) for expert in chosen}
        self._settle(waits=False)
        self._count(self._held)
        yield from self.again(layer, chosen)

    def again(self, layer: int, chosen: Sequence[int]) -> Iterator[tuple[int, Expert]]:
        """The same experts once more, where gradients go back through them: no layer runs, and nobody chose."""
        left = {(layer, expert): None for expert in chosen}
        self._held = held = set(left)
        try:
            while left:
                slot = self._wait_for(left)
                assert slot.key is not None
                yield slot.key[1], slot.expert
                del left[slot.key]
                held.discard(slot.key)
        finally:
            held.clear()
            self._forget(self._failed)
            self._failed.clear()
            if not self.policy.keeps:
                self._forget([(layer, expert) for expert in chosen])
            self._go_on()

    def _turn(self, layer: int) -> int:
        """The pass in which a layer runs next."""
        return self._clock // self.num_layers + (layer <= self._clock % self.num_layers)

    def _begin(self, layer: int, chosen: Sequence[int], *, is_prompt: bool) -> None:
        """Turn the clock to this layer."""
        self._clock = self._turn(layer) * self.num_layers + layer
        if self.trace is not None:
            self.trace.visits.append(Visit(self._clock, is_prompt, tuple(chosen)))
        self.policy.used(layer, chosen, self._clock, is_prompt=is_prompt)
        for rank, (key, due) in enumerate(self.policy.ahead(self._clock)):
            self._want(key, due, rank)
        self._likely = {key: due for key, due in self._likely.items() if due[0] > self._clock}
        self._put_off({(layer, expert) for expert in chosen})

    def _put_off(self, chosen: set[Key]) -> None:
        """Guesses whose layer runs without them wait until it runs again."""
        for slot in self._loading.values():
            if slot.due <= self._clock and slot.key not in chosen:
                self._reschedule(slot, self._clock + self.num_layers)

    def _count(self, chosen: Iterable[Key]) -> None:
        for key in chosen:
            slot = self._at.get(key)
            if slot is None:
                self.counts.missed += 1
                continue
            slot.used = self._clock
            if not slot.is_ready:
                self.counts.awaited += 1
                if slot.due > self._clock:
                    self._reschedule(slot, self._clock)
            elif slot.is_guess:
                self.counts.ahead += 1
            else:
                self.counts.resident += 1
            if slot.is_guess:
                slot.is_guess = False
                self.counts.wasted -= 1

    def _wait_for(self, left: dict[Key, None]) -> _Slot:
        """Ask for what is missing and give the first that is there."""
        while True:
            for key in left:
                slot = self._at.get(key)
                if slot is None:
                    if (slot := self._room(None)) is not None:
                        self._load(key, slot, self._clock, -1, is_guess=False)
                elif slot.error is not None:
                    error = _unreadable(key, slot.error)
                    self._forget([key])
                    raise error
            ready = next((self._at[key] for key in left if key in self._at and self._at[key].is_ready), None)
            if ready is not None:
                return ready
            begun = time.perf_counter()
            self._settle(waits=True)
            self.counts.wait_s += time.perf_counter() - begun

    def _want(self, key: Key, due: int, rank: int) -> None:
        slot = self._at.get(key)
        if slot is not None:
            if slot.due > due:
                self._reschedule(slot, due)
        elif due > self._clock:
            self._likely[key] = min(self._likely.get(key, (due, rank)), (due, rank))

    def _go_on(self) -> None:
        """Begin what is expected, the most urgent first, while the channel has little to do."""
        if not self._likely:
            return
        if len(self._loading) >= self._most_under_way:
            self._settle(waits=False)
        while self._likely and len(self._loading) < self._most_under_way:
            key = min(self._likely, key=self._likely.__getitem__)
            due, rank = self._likely[key]
            if (slot := self._room(due)) is None:
                return
            self._load(key, slot, due, rank, is_guess=True)

    def _settle(self, *, waits: bool) -> None:
        """Take notice of what the channel has brought."""
        if not self._loading:
            return
        for number, error in self._channel.finished(waits=waits):
            slot = self._loading.pop(number)
            assert slot.key is not None
            slot.error = error
            if error is None:
                slot.is_ready = True
            elif slot.key in self._held:
                self._failed.append(slot.key)
            else:  # nobody waits: whoever asks will read it again, and hear of it
                self._forget([slot.key])

    def _room(self, due: int | None) -> _Slot | None:
        """A slot for a load: an empty one, or that of the expert which is needed last, after ``due`` at any rate."""
        if self._empty:
            return self._empty.pop()
        if not self._is_sorted or self._clock - self._sorted_at > self.num_layers // SORTS:
            self._sort_victims()
        while self._victims or self._sorted_at < self._clock or not self._has_all_victims:
            if not self._victims:
                self._sort_victims()
                continue
            use, key = self._victims[-1]
            slot = self._at.get(key)
            if slot is None or not slot.is_ready or key in self._held or self._has_moved(slot, key):
                self._victims.pop()  # seen again when they are sorted again
            elif due is not None and use <= due:
                return None
            else:
                self._victims.pop()
                del self._at[key]
                return slot
        return self._any_room() if due is None else None

    def _has_moved(self, slot: _Slot, key: Key) -> bool:
        """Whether it may be needed sooner than was thought when victims were sorted."""
        return slot.used >= self._sorted_at or key in self._asked

    def _sort_victims(self) -> None:
        """A few times a pass: asking about every slot for every load would cost more than it gives."""
        keys = list(self._at)
        uses = self.policy.next_uses(keys, self._clock)
        busy = len(self._held) + len(self._loading)
        count = len(keys) if self._sorted_at == self._clock else VICTIMS + busy
        last = np.argsort(uses, kind="stable")[-count:].tolist() if keys else []
        self._victims = [(uses[place], keys[place]) for place in last]
        self._sorted_at, self._has_all_victims = self._clock, count >= len(keys)
        self._is_sorted = True
        self._asked.clear()

    def _any_room(self) -> _Slot | None:
        """For a layer that waits: whoever may go, those that came since victims were sorted included."""
        for slot in self._slots:
            if slot.key is not None and slot.is_ready and slot.key not in self._held:
                del self._at[slot.key]
                return slot
        return None

    def _load(self, key: Key, slot: _Slot, due: int, rank: int, *, is_guess: bool) -> None:
        slot.key, slot.is_ready, slot.is_guess, slot.error = key, False, is_guess, None
        slot.due, slot.used = due, self._clock
        self._at[key] = self._loading[slot.number] = slot
        self._likely.pop(key, None)
        self.counts.loads += 1
        self.counts.wasted += is_guess
        self._channel.submit(slot.number, self.shelf.place(key), due, rank)

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            slot = self._at.get(key)
            if slot is not None and slot.number not in self._loading:
                del self._at[key]
                slot.key, slot.is_ready, slot.error = None, False, None
                self._empty.append(slot)


class LayerExperts:
    """``Experts`` of one layer over a cache."""

    def __init__(self, cache: ExpertCache, layer: int) -> None:
        self.cache = cache
        self.index = layer

    def serve(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Each chosen expert once, as it becomes ready."""
        for number, expert in self.cache.serve(self.index, chosen, is_prompt=is_prompt):
            yield number, _Learning(self, number, expert) if torch.is_grad_enabled() else expert

    def expect(self, likely: Sequence[int]) -> None:
        """Load these before the layer runs."""
        self.cache.expect(self.index, likely)

    def foretell(self, passes: Sequence[float]) -> None:
        """Keep longest what is chosen again soonest."""
        self.cache.foretell(self.index, passes)


@dataclass(frozen=True)
class _Learning:
    """A frozen expert whose input may be learnt through."""

    experts: LayerExperts
    number: int
    expert: Expert

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        assert add is None
        y: Tensor = _Again.apply(x, self, step)  # type: ignore[no-untyped-call]
        return y


class _Again(torch.autograd.Function):
    """Runs an expert, and once more when gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, learning: _Learning, step: Step) -> Tensor:
        ctx.save_for_backward(x)
        ctx.learning, ctx.step = learning, step
        ctx.is_cast, ctx.dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return learning.expert(x, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        cache, layer = ctx.learning.experts.cache, ctx.learning.experts.index
        for _, expert in cache.again(layer, [ctx.learning.number]):
            with torch.enable_grad(), torch.autocast("cpu", ctx.dtype, enabled=ctx.is_cast):
                y = expert(x, ctx.step)
            y.backward(grad)
        assert x.grad is not None
        return x.grad, None, None


def _memory(shelf: Shelf, count: int) -> list[memoryview]:
    """Page-aligned memory of ``count`` bundles."""
    stride = -(-shelf.bundle_bytes // PAGE) * PAGE
    whole = aligned(count * stride)
    return [whole[first : first + shelf.bundle_bytes] for first in range(0, count * stride, stride)]


def _unreadable(key: Key, error: Exception) -> VivaceError:
    if isinstance(error, VivaceError):
        return error
    return CheckpointError(f"expert {key[1]} of layer {key[0]} could not be read: {error}; check the disk, then retry")

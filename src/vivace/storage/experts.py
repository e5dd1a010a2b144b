"""Experts that are not all in memory: slots over all layers, filled on demand and ahead of time.

A mixture's router always decides and its experts always run, summed in the router's order (``core/moe.py``), so
answers are those of the resident model, bit for bit, whatever this file does. What it decides is when bytes move.

A load is cut into chunks, and a few threads take the most urgent chunk each: those of a layer that waits first, then
what is expected, by when it is due. So a demand overtakes a guess at the next chunk. An expert that is being executed
or loaded is never evicted; a guess never evicts what is needed before it, a demand evicts whatever is needed last.
A layer that chooses more experts than there are slots (a prompt chunk) runs in waves, each expert read once. Where
gradients go back through an expert it is asked for once more, since its slot may hold another by then.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vivace.core.seams import Expert
from vivace.core.step import Step
from vivace.errors import CapacityError, CheckpointError, VivaceError
from vivace.storage.policies import Hint, Key, Policy, Trace, Visit
from vivace.storage.readers import PAGE, aligned


class Shelf(Protocol):
    """Where experts lie, each as one bundle of the same size."""

    bundle_bytes: int

    def read(self, key: Key, first: int, into: memoryview) -> None:
        """Bytes ``first ..`` of an expert's bundle, as many as ``into`` holds; called from several threads."""
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
    view: memoryview
    expert: Expert
    key: Key | None = None
    is_ready: bool = False
    is_guess: bool = False
    """Brought by a guess and not used yet."""
    chunks_left: int = 0
    error: Exception | None = None


@dataclass(order=True)
class _Chunk:
    urgency: tuple[int, int, int]
    slot: _Slot = field(compare=False)
    key: Key = field(compare=False)
    first: int = field(compare=False)
    stop: int = field(compare=False)


class ExpertCache:
    """Slots for experts of all layers, and the threads that fill them."""

    def __init__(
        self,
        shelf: Shelf,
        policy: Policy,
        num_layers: int,
        num_slots: int,
        *,
        num_threads: int = 4,
        chunk_bytes: int = 512 * 1024,
    ) -> None:
        """Allocate the slots and start the threads; ``close`` stops them.

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
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self.shelf = shelf
        self.policy = policy
        self.num_layers = num_layers
        self.counts = Counts()
        self.trace: Trace | None = None
        """Filled when it is there."""
        self._chunk_bytes = chunk_bytes
        self._slots = _slots(shelf, num_slots)
        self._empty = self._slots[::-1]
        self._at: dict[Key, _Slot] = {}
        self._likely: dict[Key, tuple[int, int]] = {}
        self._chunks: list[_Chunk] = []
        self._held: set[Key] = set()
        self._clock = -1
        self._number = itertools.count()
        self._victims: list[tuple[float, int, _Slot]] = []
        """Whom to evict at this clock, the best last."""
        self._sorted_at = -1
        lock = threading.Lock()
        self._asked, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_slots(self) -> int:
        """Experts in memory at once."""
        return len(self._slots)

    def layer(self, index: int) -> LayerExperts:
        """The experts of one layer, for its mixture."""
        return LayerExperts(self, index)

    def close(self) -> None:
        """Stop the threads."""
        with self._asked:
            self._is_closed = True
            self._asked.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Load these before their layer runs, if there is time and room; the likeliest first."""
        with self._asked:
            turn = self._clock // self.num_layers + (layer <= self._clock % self.num_layers)
            due = turn * self.num_layers + layer
            if self.trace is not None:
                self.trace.hints.append(Hint(self._clock, due, tuple(likely)))
            for rank, expert in enumerate(likely):
                self.policy.expected((layer, expert), due)
                self._want((layer, expert), due, rank)
            if self._likely:
                self._asked.notify()

    def serve(self, layer: int, chosen: Sequence[int], num_rows: int = 1) -> Iterator[tuple[int, Expert]]:
        """Each chosen expert once, as it becomes ready.

        Raises:
            CheckpointError: one could not be read; the cache stays usable.
        """
        left = {(layer, expert): None for expert in chosen}
        held = set(left)
        with self._asked:
            self._begin(layer, chosen, num_rows)
            self._held = held
            self._count(left)
        try:
            while left:
                slot = self._wait_for(left)
                assert slot.key is not None
                yield slot.key[1], slot.expert
                with self._asked:
                    del left[slot.key]
                    held.discard(slot.key)
        finally:
            with self._asked:
                held.clear()
                self._forget([key for key, slot in self._at.items() if slot.error is not None])
                if not self.policy.keeps:
                    self._forget([(layer, expert) for expert in chosen])
                if self._likely:
                    self._asked.notify()

    def _begin(self, layer: int, chosen: Sequence[int], num_rows: int) -> None:
        """Turn the clock to this layer."""
        turn = self._clock // self.num_layers + (layer <= self._clock % self.num_layers)
        self._clock = turn * self.num_layers + layer
        if self.trace is not None:
            self.trace.visits.append(Visit(self._clock, num_rows, tuple(chosen)))
        for expert in chosen:
            self.policy.used((layer, expert), self._clock)
        for rank, (key, due) in enumerate(self.policy.ahead(self._clock)):
            self._want(key, due, rank)
        self._likely = {key: due for key, due in self._likely.items() if due[0] > self._clock}
        self._postpone({(layer, expert) for expert in chosen})

    def _postpone(self, chosen: set[Key]) -> None:
        """Guesses whose layer runs without them wait until it runs again."""
        late = [c for c in self._chunks if c.urgency[0] <= self._clock and c.key not in chosen]
        for chunk in late:
            chunk.urgency = (self._clock + self.num_layers, *chunk.urgency[1:])
        if late:
            heapq.heapify(self._chunks)

    def _count(self, chosen: dict[Key, None]) -> None:
        for key in chosen:
            slot = self._at.get(key)
            if slot is None:
                self.counts.missed += 1
            elif not slot.is_ready:
                self.counts.awaited += 1
            elif slot.is_guess:
                self.counts.ahead += 1
            else:
                self.counts.resident += 1
            if slot is not None and slot.is_guess:
                slot.is_guess = False
                self.counts.wasted -= 1

    def _wait_for(self, left: dict[Key, None]) -> _Slot:
        """Ask for what is missing and give the first that is there."""
        with self._arrived:
            while True:
                for key in left:
                    slot = self._at.get(key)
                    if slot is None:
                        if (slot := self._room(None)) is not None:
                            self._load(key, slot, (self._clock, -1), is_guess=False)
                    elif slot.error is not None:
                        error = _unreadable(key, slot.error)
                        self._forget([key])
                        raise error
                ready = next((self._at[key] for key in left if key in self._at and self._at[key].is_ready), None)
                if ready is not None:
                    return ready
                begun = time.perf_counter()
                self._arrived.wait()
                self.counts.wait_s += time.perf_counter() - begun

    def _want(self, key: Key, due: int, rank: int) -> None:
        if key not in self._at and due > self._clock:
            self._likely[key] = min(self._likely.get(key, (due, rank)), (due, rank))

    def _room(self, due: int | None) -> _Slot | None:
        """A slot for a load: an empty one, or that of the expert which is needed last, after ``due`` at any rate."""
        if self._empty:
            return self._empty.pop()
        if self._sorted_at != self._clock:
            self._sort_victims()
        while self._victims:
            use, _, slot = self._victims[-1]
            key = slot.key
            if key is None or key in self._held or not slot.is_ready or self.policy.next_use(key, self._clock) < use:
                self._victims.pop()  # it has moved since: seen again when the clock has turned
            elif due is not None and use <= due:
                return None
            else:
                self._victims.pop()
                del self._at[key]
                return slot
        return self._any_room() if due is None else None

    def _sort_victims(self) -> None:
        """Once a layer: asking about every slot for every load would cost more than it gives."""
        next_use, clock = self.policy.next_use, self._clock
        ready = ((n, slot, slot.key) for n, slot in enumerate(self._slots) if slot.is_ready)
        self._victims = sorted((next_use(key, clock), -n, slot) for n, slot, key in ready if key is not None)
        self._sorted_at = clock

    def _any_room(self) -> _Slot | None:
        """For a layer that waits: whoever may go, those that came since victims were sorted included."""
        for slot in self._slots:
            if slot.key is not None and slot.is_ready and slot.key not in self._held:
                del self._at[slot.key]
                return slot
        return None

    def _load(self, key: Key, slot: _Slot, urgency: tuple[int, int], *, is_guess: bool) -> None:
        starts = range(0, self.shelf.bundle_bytes, self._chunk_bytes)
        slot.key, slot.is_ready, slot.is_guess, slot.error = key, False, is_guess, None
        slot.chunks_left = len(starts)
        self._at[key] = slot
        self._likely.pop(key, None)
        self.counts.loads += 1
        self.counts.wasted += is_guess
        for first in starts:
            stop = min(first + self._chunk_bytes, self.shelf.bundle_bytes)
            heapq.heappush(self._chunks, _Chunk((*urgency, next(self._number)), slot, key, first, stop))
        self._asked.notify(len(starts))

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            slot = self._at.get(key)
            if slot is not None and slot.chunks_left == 0:
                del self._at[key]
                slot.key, slot.is_ready, slot.error = None, False, None
                self._empty.append(slot)

    def _work(self) -> None:
        """A thread's life: the most urgent chunk, again and again."""
        while True:
            with self._asked:
                chunk = self._next()
                while chunk is None and not self._is_closed:
                    self._asked.wait()
                    chunk = self._next()
                if chunk is None or self._is_closed:
                    return
            error: Exception | None = None
            try:
                self.shelf.read(chunk.key, chunk.first, chunk.slot.view[chunk.first : chunk.stop])
            except (OSError, VivaceError) as exc:
                error = exc
            with self._arrived:
                self._finish(chunk.slot, error)

    def _next(self) -> _Chunk | None:
        if not self._chunks and self._likely:
            key = min(self._likely, key=self._likely.__getitem__)
            due = self._likely[key]
            if (slot := self._room(due[0])) is not None:
                self._load(key, slot, due, is_guess=True)
        return heapq.heappop(self._chunks) if self._chunks else None

    def _finish(self, slot: _Slot, error: Exception | None) -> None:
        slot.chunks_left -= 1
        slot.error = slot.error or error
        if slot.chunks_left:
            return
        assert slot.key is not None
        if slot.error is None:
            slot.is_ready = True
        elif slot.key not in self._held:  # nobody waits: whoever asks will read it again, and hear of it
            self._forget([slot.key])
        self._arrived.notify_all()


class LayerExperts:
    """``Experts`` of one layer over a cache."""

    def __init__(self, cache: ExpertCache, layer: int) -> None:
        self.cache = cache
        self.index = layer

    def serve(self, chosen: Sequence[int]) -> Iterator[tuple[int, Expert]]:
        """Each chosen expert once, as it becomes ready."""
        for number, expert in self.cache.serve(self.index, chosen):
            yield number, _Learning(self, number, expert) if torch.is_grad_enabled() else expert

    def expect(self, likely: Sequence[int]) -> None:
        """Load these before the layer runs."""
        self.cache.expect(self.index, likely)


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
        for _, expert in cache.serve(layer, [ctx.learning.number]):
            with torch.enable_grad(), torch.autocast("cpu", ctx.dtype, enabled=ctx.is_cast):
                y = expert(x, ctx.step)
            y.backward(grad)
        assert x.grad is not None
        return x.grad, None, None


def _slots(shelf: Shelf, count: int) -> list[_Slot]:
    """Page-aligned memory of ``count`` bundles."""
    stride = -(-shelf.bundle_bytes // PAGE) * PAGE
    whole = aligned(count * stride)
    every = torch.frombuffer(whole, dtype=torch.uint8)
    slots = []
    for first in range(0, count * stride, stride):
        stop = first + shelf.bundle_bytes
        slots.append(_Slot(whole[first:stop], shelf.expert(every[first:stop])))
    return slots


def _unreadable(key: Key, error: Exception) -> VivaceError:
    if isinstance(error, VivaceError):
        return error
    return CheckpointError(f"expert {key[1]} of layer {key[0]} could not be read: {error}; check the disk, then retry")

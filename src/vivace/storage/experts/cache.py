"""The expert cache: gives each layer the experts that its router chose, from memory or from an expert store.

A mixture's router always decides and its experts always run, summed in the router's order (``core/moe.py``), so answers
are those of the resident model, bit for bit, whatever the cache does. It only decides when bytes move.

Reads are scheduled by urgency: first the experts of a layer that waits, then predicted ones by the clock at which they
are due. A prefetch never evicts an expert that is used before it; a demand evicts the expert that is used last. An
expert that is being read or run is never evicted. A layer that chooses more experts than there are slots (a prompt
chunk) runs in waves, each expert read once. Where gradients go back through an expert, it is fetched once more, since
its slot may hold another by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vivace.core.moe import Expert
from vivace.errors import CheckpointError, VivaceError
from vivace.storage.experts.fetches import ExpertFetches
from vivace.storage.experts.policy import Key, Policy
from vivace.storage.experts.prefetch import PrefetchQueue
from vivace.storage.experts.slots import ExpertSlots, Slot
from vivace.storage.experts.store import ExpertStore
from vivace.storage.io.readers import NUM_THREADS

CHUNK_BYTES = 512 * 1024
"""Bytes after which a demand overtakes a prefetch."""


@dataclass
class Counts:
    """What happened since the cache was made."""

    hits: int = 0
    """Chosen experts that were in memory from an earlier use."""
    prefetched: int = 0
    """Chosen experts that a prefetch had brought in time."""
    late: int = 0
    """Chosen experts whose read had begun and had not ended."""
    misses: int = 0
    """Chosen experts that nobody had asked for."""
    loads: int = 0
    """Reads of an expert that were begun."""
    wasted: int = 0
    """Prefetches that were never used: evicted, or still in memory."""
    wait_s: float = 0.0
    """Seconds that the model stood still."""

    @property
    def uses(self) -> int:
        """Return how many experts routers have chosen in all."""
        return self.hits + self.prefetched + self.late + self.misses


class ExpertCache:
    """Fetches and prefetches the experts of all layers; used by one thread at a time."""

    def __init__(
        self,
        store: ExpertStore,
        policy: Policy,
        num_layers: int,
        num_slots: int,
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Allocate the slots and open the store; ``close`` closes it.

        Args:
            store: where experts lie.
            policy: predicts when each expert is used next.
            num_layers: layers of the model.
            num_slots: experts in memory at once.
            num_threads: reads under way at once.
            chunk_bytes: most bytes of one read, a multiple of 4096.

        Raises:
            CapacityError: no slot at all.
        """
        self.store = store
        self.policy = policy
        self.num_layers = num_layers
        self.counts = Counts()
        self.slots = ExpertSlots(store, policy, num_layers, num_slots)
        self.fetches = ExpertFetches(store, num_threads=num_threads, chunk_bytes=chunk_bytes)
        self._queue = PrefetchQueue()
        self._clock = -1
        """Clock of the layer that ran last."""
        self._failed: list[Key] = []
        """Experts in use that could not be read."""

    @property
    def num_slots(self) -> int:
        """Experts in memory at once."""
        return len(self.slots)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is being read, and nothing that is predicted could be."""
        self._collect(waits=False)
        self._begin_prefetches()
        return not len(self.fetches)

    def close(self) -> None:
        """Stop reading; no expert can be fetched any more."""
        self.fetches.close()

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prefetch(self, layer: int, likely: Sequence[int]) -> None:
        """Read these experts before their layer runs, as far as time and room allow.

        Args:
            layer: whose experts are predicted; this replaces the last prediction for it.
            likely: numbers of experts, the likeliest first.
        """
        due = self._next_run(layer)
        self.policy.predicted(layer, likely, due)
        for key in self._queue.replace(layer, likely):
            slot = self.slots.find(key)
            if slot is not None and slot.due == due:
                self.fetches.reschedule(slot, due + self.num_layers)
        keys = [(layer, expert) for expert in likely]
        self.slots.note_predicted(keys)
        for rank, key in enumerate(keys):
            self._want(key, due, rank)
        self._begin_prefetches()

    def predict_reuse(self, layer: int, passes: Sequence[float]) -> None:
        """Record in how many passes each expert is predicted to be chosen again; the policy may use it for eviction.

        Args:
            layer: whose experts are meant.
            passes: (X,) for each expert, counted from the next pass of the layer.
        """
        self.policy.reuse_predicted(layer, passes, self._next_run(layer) // self.num_layers)
        self.slots.note_forecast()

    def fetch(self, layer: int, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each expert that a layer chose once, as it becomes ready; it is good until the next is asked for.

        Args:
            layer: which layer runs.
            chosen: numbers of the experts that its router chose.
            is_prompt: the rows belong to a prompt, which chooses nearly all experts.

        Raises:
            CheckpointError: one could not be read; the cache stays usable.
        """
        keys = {(layer, expert) for expert in chosen}
        self._advance(layer, chosen, keys, is_prompt=is_prompt)
        self.slots.in_use = keys
        self._collect(waits=False)
        self._count(keys)
        yield from self.fetch_again(layer, chosen)

    def fetch_again(self, layer: int, chosen: Sequence[int]) -> Iterator[tuple[int, Expert]]:
        """Yield experts once more for the backward pass: no layer runs, and nothing is counted as chosen."""
        left = {(layer, expert): None for expert in chosen}
        self.slots.in_use = in_use = set(left)
        try:
            while left:
                slot = self._wait_for_any(left)
                assert slot.key is not None
                yield slot.key[1], slot.expert
                del left[slot.key]
                in_use.discard(slot.key)
        finally:
            in_use.clear()
            self.slots.empty(self._failed)
            self._failed.clear()
            if not self.policy.keeps:
                self.slots.empty((layer, expert) for expert in chosen)
            self._begin_prefetches()

    def _next_run(self, layer: int) -> int:
        """Return the clock at which a layer runs next."""
        turn = self._clock // self.num_layers + (layer <= self._clock % self.num_layers)
        return turn * self.num_layers + layer

    def _advance(self, layer: int, chosen: Sequence[int], keys: set[Key], *, is_prompt: bool) -> None:
        """Set the clock to a layer that runs, and reschedule what was predicted for it."""
        self._clock = self._next_run(layer)
        self.policy.used(layer, chosen, self._clock, is_prompt=is_prompt)
        for rank, (key, due) in enumerate(self.policy.prefetches(self._clock)):
            self._want(key, due, rank)
        self._queue.drop_until(self._clock)
        for slot in self.fetches.slots:
            if slot.due <= self._clock and slot.key not in keys:  # it was predicted and not chosen
                self.fetches.reschedule(slot, self._clock + self.num_layers)

    def _count(self, chosen: Iterable[Key]) -> None:
        """Count chosen experts by where they are, and hurry those that are being read."""
        for key in chosen:
            slot = self.slots.find(key)
            if slot is None:
                self.counts.misses += 1
                continue
            slot.used = self._clock
            if not slot.is_ready:
                self.counts.late += 1
                if slot.due > self._clock:
                    self.fetches.reschedule(slot, self._clock)
            elif slot.is_prefetch:
                self.counts.prefetched += 1
            else:
                self.counts.hits += 1
            if slot.is_prefetch:
                slot.is_prefetch = False
                self.counts.wasted -= 1

    def _wait_for_any(self, left: dict[Key, None]) -> Slot:
        """Begin to read whichever of these experts are missing, and return the first that is ready."""
        while True:
            for key in left:
                slot = self.slots.find(key)
                if slot is None:
                    if (slot := self.slots.take(self._clock)) is not None:
                        self._load(key, slot, self._clock, -1, is_prefetch=False)
                elif slot.error is not None:
                    error = _unreadable(key, slot.error)
                    self.slots.empty([key])
                    raise error
            found = map(self.slots.find, left)
            ready = next((slot for slot in found if slot is not None and slot.is_ready), None)
            if ready is not None:
                return ready
            begun = time.perf_counter()
            self._collect(waits=True)
            self.counts.wait_s += time.perf_counter() - begun

    def _want(self, key: Key, due: int, rank: int) -> None:
        """Prefetch an expert: hurry its read, or queue it if it is neither in memory nor being read."""
        slot = self.slots.find(key)
        if slot is not None:
            if slot.due > due:
                self.fetches.reschedule(slot, due)
        elif due > self._clock:
            self._queue.add(key, due, rank)

    def _begin_prefetches(self) -> None:
        """Begin to read what is predicted, the most urgent first, until the reader has enough to do."""
        if self._queue and self.fetches.is_busy:
            self._collect(waits=False)
        while self._queue and not self.fetches.is_busy:
            key, due, rank = self._queue.most_urgent()
            if (slot := self.slots.take(self._clock, due)) is None:
                return
            self._load(key, slot, due, rank, is_prefetch=True)

    def _load(self, key: Key, slot: Slot, due: int, rank: int, *, is_prefetch: bool) -> None:
        slot.is_prefetch, slot.used, slot.begun = is_prefetch, self._clock, self._clock
        self.slots.put(key, slot)
        self._queue.drop(key)
        self.counts.loads += 1
        self.counts.wasted += is_prefetch
        try:
            self.fetches.begin(slot, due, rank)
        except BaseException:
            self.slots.empty([key])  # nothing is being read into it
            raise

    def _collect(self, *, waits: bool) -> None:
        """Take note of the reads that have ended."""
        for slot in self.fetches.completed(waits=waits):
            if slot.error is None:
                continue
            assert slot.key is not None
            if slot.key in self.slots.in_use and slot.begun == self._clock:
                self._failed.append(slot.key)
            else:  # read for nobody, or before this layer ran: whoever wants it reads it again, and receives that error
                self.slots.empty([slot.key])


def _unreadable(key: Key, error: Exception) -> VivaceError:
    if isinstance(error, VivaceError):
        return error
    return CheckpointError(f"expert {key[1]} of layer {key[0]} could not be read: {error}; check the disk, then retry")

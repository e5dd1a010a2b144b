"""Which experts are in memory: slots over all layers, and whose slot is given to another expert.

The expert whose predicted next use lies farthest ahead is evicted. Asking the policy about every slot at every load
would cost more than it gives, so candidates are sorted a few times a pass; one whose prospects may have changed since
is passed over until they are sorted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vivace.core.moe import Expert
from vivace.errors import CapacityError
from vivace.storage.experts.policy import Key, Policy
from vivace.storage.experts.store import ExpertStore
from vivace.storage.io.async_reader import PendingRead
from vivace.storage.io.readers import PAGE, aligned

SORTS_PER_PASS = 2
"""How often eviction candidates are sorted in a pass, at least where slots are needed."""

CANDIDATES = 64
"""Slots that are sorted out as candidates at first; all of them where these run out within a layer."""


@dataclass(eq=False)
class Slot:
    """Memory for one expert, and what is in it."""

    memory: memoryview
    expert: Expert
    """The feed-forward over ``memory``."""
    key: Key | None = None
    """The expert that is there or being read; None for an empty slot."""
    read: PendingRead | None = None
    """The read that fills the slot, while it is under way."""
    error: Exception | None = None
    """Why the expert could not be read; kept until whoever fetches it has received the error."""
    is_prefetch: bool = False
    """The expert was read because it was predicted, and has not been used yet."""
    due: int = 0
    """Clock that the read is scheduled for."""
    used: int = -1
    """Clock at which the expert was chosen last, or its read began."""
    begun: int = -1
    """Clock at which its read began."""

    @property
    def is_ready(self) -> bool:
        """Return whether the expert can run."""
        return self.key is not None and self.read is None and self.error is None


class ExpertSlots:
    """All slots, by the expert that each holds."""

    def __init__(self, store: ExpertStore, policy: Policy, num_layers: int, num_slots: int) -> None:
        """Allocate the slots.

        Args:
            store: makes feed-forwards over their memory.
            policy: predicts next uses.
            num_layers: layers of the model.
            num_slots: experts in memory at once.

        Raises:
            CapacityError: no slot at all.
        """
        if num_slots < 1:
            raise CapacityError(f"{num_slots} slots hold no expert of {store.expert_bytes} bytes; give more memory")
        self._policy = policy
        self._sort_every = num_layers // SORTS_PER_PASS
        memories = _memories(store.expert_bytes, num_slots)
        self._slots = [Slot(each, store.expert(torch.frombuffer(each, dtype=torch.uint8))) for each in memories]
        self._empty = self._slots[::-1]
        self._slot_of: dict[Key, Slot] = {}
        self.in_use: set[Key] = set()
        """Experts that the layer at hand has still to run; they are not evicted."""
        self._candidates: list[tuple[float, Key]] = []
        """Predicted next uses and experts; the best to evict is the last."""
        self._sorted_at = -1
        self._is_sorted = self._has_all = False
        self._predicted: set[Key] = set()
        """Experts that were predicted since candidates were sorted."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def keys(self) -> list[Key]:
        """The experts that are in memory or being read."""
        return list(self._slot_of)

    def find(self, key: Key) -> Slot | None:
        """Return the slot of an expert, whether it is ready or being read."""
        return self._slot_of.get(key)

    def put(self, key: Key, slot: Slot) -> None:
        """Give a slot that ``take`` returned to an expert."""
        slot.key, slot.error = key, None
        self._slot_of[key] = slot

    def empty(self, keys: Iterable[Key]) -> None:
        """Drop experts, except those that are being read."""
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is not None and slot.read is None:
                del self._slot_of[key]
                slot.key = slot.error = None
                self._empty.append(slot)

    def note_predicted(self, keys: Iterable[Key]) -> None:
        """Note that these experts may be used sooner than the candidates were sorted by."""
        self._predicted.update(keys)

    def note_forecast(self) -> None:
        """Note that next uses have changed for many experts: sort candidates anew."""
        self._is_sorted = False

    def take(self, clock: int, due: int | None = None) -> Slot | None:
        """Return an empty slot, if need be by evicting the expert whose next use lies farthest ahead.

        Args:
            clock: the present.
            due: when the load is needed; experts that are used until then are not evicted for it. None is a demand,
                which evicts any expert that is not in use.
        """
        if self._empty:
            return self._empty.pop()
        if not self._is_sorted or clock - self._sorted_at > self._sort_every:
            self._sort(clock)
        while self._candidates or self._sorted_at < clock or not self._has_all:
            if not self._candidates:
                self._sort(clock)
                continue
            next_use, key = self._candidates[-1]
            slot = self._slot_of.get(key)
            if slot is None or not slot.is_ready or key in self.in_use or self._has_changed(slot, key):
                self._candidates.pop()  # considered again when they are sorted again
            elif due is not None and next_use <= due:
                return None
            else:
                self._candidates.pop()
                return self._evict(slot)
        return self._any_unused() if due is None else None

    def _has_changed(self, slot: Slot, key: Key) -> bool:
        """Return whether the expert may be used sooner than was predicted when candidates were sorted."""
        return slot.used >= self._sorted_at or key in self._predicted

    def _sort(self, clock: int) -> None:
        """Ask the policy about all experts, and keep those used last as candidates."""
        keys = self.keys
        uses = self._policy.next_uses(keys, clock)
        # Experts in use cannot be evicted; the few that are being read are not counted, as that would take longer.
        count = len(keys) if self._sorted_at == clock else CANDIDATES + len(self.in_use)
        last = np.argsort(uses, kind="stable")[-count:].tolist() if keys else []
        self._candidates = [(uses[place], keys[place]) for place in last]
        self._sorted_at, self._has_all = clock, count >= len(keys)
        self._is_sorted = True
        self._predicted.clear()

    def _any_unused(self) -> Slot | None:
        """Return the slot of any expert that is not in use, also one that came since candidates were sorted."""
        for slot in self._slots:
            if slot.is_ready and slot.key not in self.in_use:
                return self._evict(slot)
        return None

    def _evict(self, slot: Slot) -> Slot:
        """Take a slot away from its expert."""
        assert slot.key is not None
        del self._slot_of[slot.key]
        slot.key = None
        return slot


def _memories(num_bytes: int, count: int) -> Sequence[memoryview]:
    """Allocate ``count`` times ``num_bytes``, each beginning on a page."""
    stride = -(-num_bytes // PAGE) * PAGE
    whole = aligned(count * stride)
    return [whole[first : first + num_bytes] for first in range(0, count * stride, stride)]

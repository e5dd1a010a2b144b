"""The loop of the ranks that follow: each pass and each change of a cache that rank 0 sends is repeated here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import torch

from vivace.core.cache import Fresh, KVCache
from vivace.core.model import Decoder
from vivace.core.pending import PendingKV
from vivace.core.seams import Memory
from vivace.kernels.threads import one_pytorch_thread
from vivace.parallel import passes
from vivace.parallel.world import END, World


class Follower:
    """Repeats what rank 0 does on this rank's share of a model."""

    def __init__(self, world: World, decoder: Decoder, offset: int = 0) -> None:
        """Follow rank 0 with a decoder that holds this rank's share of the layers; ``offset`` is its leader's."""
        self._offset = offset
        self.operations = frozenset(range(offset, offset + passes.FORK + 1))
        self._world = world
        self._decoder = decoder
        self.caches: dict[int, KVCache] = {}
        """This rank's parts of the caches of sessions, by the numbers that rank 0 gives them."""
        self._fresh = Fresh()
        self._is_native = getattr(decoder.backend, "body", None) is not None

    def take(self, operation: int, numbers: list[int], rest: memoryview) -> None:
        """Repeat an operation of rank 0: run a pass, or change a cache."""
        operation -= self._offset
        if operation == passes.RUN:
            self._run(numbers, rest)
        else:
            self._change(operation, numbers[0], numbers[1:])

    def _run(self, numbers: list[int], rest: memoryview) -> None:
        memory: Memory = self._memory_of(numbers)
        step, start, stop = passes.unpack_pass(numbers, memory)
        h = passes.rows_of(rest, step.num_rows, self._decoder.dtype)
        with one_pytorch_thread() if self._is_native else nullcontext():
            self._decoder.run(h, step, start, stop)

    def _memory_of(self, numbers: list[int]) -> Memory:
        """Return what a pass works on."""
        number = passes.cache_of_pass(numbers)
        if number is None and numbers[1] == 0:
            self._fresh = Fresh()
        return self._fresh if number is None else self.caches[number]

    def _change(self, operation: int, number: int, numbers: list[int]) -> None:
        if operation == passes.OPEN:
            num_slots, capacity, row_count = numbers
            self.caches[number] = self._decoder.new_cache(num_slots, capacity, row_count=row_count)
            return
        cache = self.caches[number]
        match operation:
            case passes.CLOSE:
                del self.caches[number]
            case passes.COMMIT:
                slots, *paths = passes.unpack_lists(numbers)
                cache.commit(slots, paths)
            case passes.TRUNCATE:
                slots, lengths = passes.unpack_lists(numbers)
                cache.truncate(slots, lengths)
            case passes.RELEASE:
                cache.release(numbers)
            case passes.RESTORE:
                cache.restore((numbers, [PendingKV() for _ in numbers], None))
            case passes.FORK:
                sources, targets = passes.unpack_lists(numbers)
                cache.fork(sources, targets)


class Following(Protocol):
    """Follows rank 0 in some operations."""

    operations: frozenset[int]

    def take(self, operation: int, numbers: list[int], rest: memoryview) -> None:
        """Do what rank 0 asks for."""
        ...


@torch.inference_mode()
def follow(world: World, *followers: Following) -> None:
    """Follow rank 0 until it has ended.

    Raises:
        WorldError: a rank is gone, hangs or has given up.
    """
    taking = {operation: follower for follower in followers for operation in follower.operations}
    while (message := world.links.message(0, is_idle=True)) != END:
        operation, numbers, rest = passes.unpacked(message)
        if operation not in taking:
            world.links.fail(f"rank 0 sent operation {operation}, which rank {world.rank} does not know")
        taking[operation].take(operation, numbers, rest)

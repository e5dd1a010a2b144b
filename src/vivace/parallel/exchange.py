"""How entries of a prompt travel between the ranks that read its pieces: along a chain, or gathered by all of them.

What is sent are the cache's own entries, read from where they lie and received where they will lie. Receiving goes on
in threads beside the computation, one for each rank that sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.kernels import reference as kernels
from vivace.parallel.world import World

Range = tuple[int, int]
"""First entry, and one past the last."""


@dataclass(frozen=True)
class ChainPlace:
    """A rank's place in the chain of one prompt."""

    first: int
    """The rank reads tokens first..stop-1."""
    stop: int
    sender: int | None
    """From which rank the entries before them come; None at the beginning of the chain."""
    receiver: int | None
    """To which rank they go on; None at its end."""


def place_of(rank: int, counts: Sequence[int]) -> ChainPlace | None:
    """Return a rank's place where pieces of these lengths are read by ranks 1, 2, ... and the last one by rank 0.

    It is None for a rank that reads nothing.
    """
    number = len(counts) - 1 if rank == 0 else rank - 1
    if number >= len(counts) or (rank and number == len(counts) - 1):
        return None
    first = sum(counts[:number])
    is_last = number == len(counts) - 1
    receiver = None if is_last else (number + 2) % len(counts)
    return ChainPlace(first, first + counts[number], number if number else None, receiver)


class Exchange(Protocol):
    """Gives a rank the entries of the other pieces that it reads."""

    def entries(self, layer: int) -> None:
        """Send this rank's entries of a layer, which are stored, and wait for those that it reads."""
        ...


class ChainExchange:
    """Implements ``Exchange``: entries in front of a piece come from the rank before, and all go on to the next."""

    def __init__(self, world: World, cache: KVCache, slot: int, place: ChainPlace) -> None:
        """Begin to receive, layer by layer, the entries in front of this rank's piece."""
        self._world = world
        self._cache = cache
        self._slot = slot
        self._place = place
        self._arriving = None
        if place.sender is not None:
            self._arriving = Arriving(world, cache, slot, place.sender, lambda layer: self._seen(layer, place.first))

    def entries(self, layer: int) -> None:
        """Wait for the prefix, and send it on with this rank's own entries."""
        if self._arriving is not None:
            self._arriving.wait(layer)
        if self._place.receiver is not None:
            sent = entries_of(self._cache, layer, self._slot, *self._seen(layer, self._place.stop))
            self._world.links.send(self._place.receiver, layer, *sent, purpose="entries")

    def _seen(self, layer: int, stop: int) -> Range:
        """Return the entries before ``stop`` that a row there can see."""
        window = self._cache.store.specs[layer].window
        return (0 if window is None else max(0, stop - window + 1)), stop


class GatherExchange:
    """Implements ``Exchange``: every rank sends its entries to all others and waits for theirs, in every layer."""

    def __init__(self, world: World, cache: KVCache, slot: int, place: ChainPlace, counts: Sequence[int]) -> None:
        """Begin to receive, layer by layer, the entries of all other ranks' pieces, of ``counts`` tokens each."""
        self._world = world
        self._cache = cache
        self._slot = slot
        self._own = place.first, place.stop
        stops = list(accumulate(counts))
        pieces = {(number + 1) % len(counts): (stop - counts[number], stop) for number, stop in enumerate(stops)}
        del pieces[world.rank]
        self._others = [
            (rank, Arriving(world, cache, slot, rank, lambda _, piece=piece: piece))  # type: ignore[misc]
            for rank, piece in pieces.items()
        ]

    def entries(self, layer: int) -> None:
        """Send and wait."""
        for rank, _ in self._others:
            sent = entries_of(self._cache, layer, self._slot, *self._own)
            self._world.links.send(rank, layer, *sent, purpose="entries")
        for _, arriving in self._others:
            arriving.wait(layer)


class DenseRows:
    """Attention of every row to the whole prompt, with what it must not see masked afterwards, chunk by chunk."""

    def __init__(self, step: Step, length: int) -> None:
        """Attend for the rows of a call, which are chunks of one slot's prompt of ``length`` tokens."""
        self._step = step
        self._length = length
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def read(self, layer: Layer, q: Tensor) -> Tensor:
        """Return the attention of queries (T, H, D), (T, H, D)."""
        step, attention, out = self._step, layer.attention, torch.empty_like(q)
        memory = step.memory
        assert isinstance(memory, KVCache), "prompts are read into a cache"
        slot = int(step.slot[0])
        keys, values = (part[None] for part in memory.entries(layer.index, slot, self._length))
        chunks = step.chunk or ((slot, 0, len(q)),)
        for _, first, stop in chunks:
            out[first:stop] = kernels.attend_chunk(
                q[None, first:stop],
                keys,
                values,
                self._mask(first, stop, attention.window, q.dtype),
                scale=attention.scale,
                softcap=attention.softcap,
            )[0]
        return out

    def _mask(self, first: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of rows first..stop-1, (rows, length)."""
        if (first, window) not in self._masks:
            at, entry = self._step.position[first:stop, None], torch.arange(self._length)[None]
            hidden = entry > at
            if window is not None:
                hidden |= entry <= at - window
            self._masks[first, window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
        return self._masks[first, window]


class Arriving:
    """Receives entries that another rank sends, layer by layer, in a thread of its own."""

    def __init__(self, world: World, cache: KVCache, slot: int, sender: int, entries: Callable[[int], Range]) -> None:
        """Begin to receive, for each layer, the entries that ``entries`` names, into their places in a slot."""
        self._arrived = threading.Condition()
        self._num_layers = 0
        self._error: BaseException | None = None

        def receive() -> None:
            try:
                for layer in range(len(cache.store.specs)):
                    world.links.receive(sender, layer, *entries_of(cache, layer, slot, *entries(layer)))
                    with self._arrived:
                        self._num_layers = layer + 1
                        self._arrived.notify()
            except BaseException as error:  # noqa: BLE001 - raised where the entries are waited for
                with self._arrived:
                    self._error = error
                    self._arrived.notify()

        threading.Thread(target=receive, name="vivace-entries", daemon=True).start()

    def wait(self, layer: int) -> None:
        """Wait until a layer's entries are there."""
        with self._arrived:
            while self._num_layers <= layer:
                if self._error is not None:
                    raise self._error
                self._arrived.wait()


def entries_of(
    cache: KVCache, layer: int, slot: int, start: int, stop: int, heads: slice = slice(None)
) -> list[Tensor]:
    """Return the memory of entries start..stop-1 of a slot: views of neighbouring entries of one head each."""
    pool, size = cache.store.place_of_layer[layer][0], cache.store.size
    blocks = cache.tables[pool].blocks[slot]
    runs: list[list[int]] = []
    for place in range(start // size, -(-stop // size)):
        begin = blocks[place] * size + max(0, start - place * size)
        end = blocks[place] * size + min(size, stop - place * size)
        if runs and runs[-1][1] == begin:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    return [head[begin:end] for part in cache.store.stored(layer) for head in part[heads] for begin, end in runs]

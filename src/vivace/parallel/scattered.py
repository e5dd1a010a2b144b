"""KV-Runahead for the prompt, tensor parallelism for decoding: heads are scattered while the prompt is read.

Every rank holds the whole model, with which prompts are read along the chain (``runahead.py``), and its share of every
layer, with which all ranks decode (``tensor.py``). In each layer rank 0 has the keys and values of the whole prompt
before it attends; there it sends every other rank those of that rank's heads which the rank has not read itself. They
travel beside the computation, against the direction of the chain, so that the first token waits for the last layer's
alone.

Prompts have the entries of one process, bit for bit; what is decoded has the sums of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.decode.prefill import PrefillState
from vivace.parallel import passes
from vivace.parallel.exchange import Arriving, entries_of, place_of
from vivace.parallel.following import Follower, Following
from vivace.parallel.leading import Leader, LedSpan
from vivace.parallel.measuring import cache_of
from vivace.parallel.partition_table import Table
from vivace.parallel.runahead import CHAIN, PieceReading, RunaheadFollower, RunaheadPrefill, RunaheadState
from vivace.parallel.runahead import KIND as RUNAHEAD
from vivace.parallel.shares import Share, shares_of
from vivace.parallel.world import World

KIND = "runahead-tensor"


class ScatteredPrefill(RunaheadPrefill):
    """Implements ``Prefill``: prompts are read with the whole model, and sessions decode with shares of it."""

    def __init__(self, world: World, table: Table | None = None) -> None:
        """Read among the ranks of a world, of which this process is rank 0; ``hold`` gives what is read with."""
        super().__init__(world, RUNAHEAD, table)
        self._whole: Decoder | None = None

    @property
    def whole(self) -> Decoder:
        """Return the whole model."""
        assert self._whole is not None, "the model is held before prompts are read"
        return self._whole

    def hold(self, whole: Decoder, share: Decoder) -> None:
        """Read with a model beside which sessions run its share."""
        self._whole, self.turn = whole, leader_of(share).turn  # the other ranks do one thing at a time

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session that runs the share ``model``."""
        return _ScatteredState(self, model, cache, chunk)


class _ScatteredState(RunaheadState):
    """Reads the prompts of one session."""

    def __init__(self, prefill: ScatteredPrefill, model: Decoder, cache: KVCache, chunk: int) -> None:
        super().__init__(prefill, model, cache, chunk)
        self._prefill: ScatteredPrefill = prefill
        self._leader = leader_of(model)
        self._shares = shares_of(prefill.whole.config, prefill.world.size)

    def is_shared(self, count: int) -> bool:
        """Return True for every prompt: rank 0 reads short ones alone, but with the whole model."""
        return count > 0

    def read_together(self, slot: int, tokens: Sequence[int]) -> None:
        """Fill a slot with the entries of this rank's heads, and those of the other ranks with theirs."""
        prefill, count = self._prefill, len(tokens)
        world, whole = prefill.world, prefill.whole
        cache = cache_of(whole, count)
        cache.prompts[0] = self.cache.prompts[slot]
        counts = prefill.counts(whole, count, self.chunk)
        known = {rank: entries_read(rank, counts) for rank in world.others}

        def scatter(layer: int) -> None:
            for rank, first in known.items():
                heads = heads_of(self._shares[rank])
                world.links.send(rank, layer, *entries_of(cache, layer, 0, first, count, heads), purpose="heads")
            copy_heads(cache, self.cache, slot, layer, count, self._shares[0])

        with prefill.turn:
            self._leader.tell(passes.HEADS, self._leader.number_of(self.cache), slot, count)
            prefill.read(whole, cache, 0, tokens, PieceReading(self.chunk, CHAIN, counts), scatter)


class ScatteredFollower(RunaheadFollower):
    """Reads pieces of prompts, and leaves in the cache of this rank's share what its heads have of all of them."""

    operations = RunaheadFollower.operations | {passes.HEADS}

    def __init__(self, world: World, whole: Decoder, follower: Follower) -> None:
        """Read with the whole model beside the share of a follower, whose caches are filled."""
        super().__init__(world, whole)
        self._follower = follower
        self._share = shares_of(whole.config, world.size)[world.rank]
        self._filled: tuple[KVCache, int, int] | None = None
        """Where the heads of the next prompt belong, and how many entries they have; None where rank 0 keeps all."""

    def take(self, operation: int, numbers: list[int], rest: memoryview) -> None:
        """Do what rank 0 asks for."""
        if operation == passes.HEADS:
            number, slot, count = numbers
            self._filled = self._follower.caches[number], slot, count
        else:
            super().take(operation, numbers, rest)

    def read(self, length: int, tokens: Sequence[int], reading: PieceReading) -> KVCache | None:
        """Read this rank's piece while the heads of all others arrive, and put its own beside them."""
        if self._filled is None:
            return super().read(length, tokens, reading)
        (cache, slot, count), self._filled = self._filled, None
        cache.extend([slot], [count])
        known = entries_read(self._world.rank, reading.counts)
        arriving = Arriving(self._world, cache, slot, 0, lambda _: (known, count))
        found, last = super().read(length, tokens, reading), len(cache.store.specs) - 1
        if found is not None:
            for layer in range(last + 1):
                copy_heads(found, cache, slot, layer, known, self._share)
        arriving.wait(last)
        return found


def scattered_followers(world: World, whole: Decoder, share: Decoder) -> list[Following]:
    """Return who follows rank 0 with a rank's share, and with the whole model."""
    follower = Follower(world, share)
    return [follower, ScatteredFollower(world, whole, follower)]


def leader_of(share: Decoder) -> Leader:
    """Return who tells the other ranks what sessions do with a share of a model."""
    span = share.backend.span
    assert isinstance(span, LedSpan)
    return span.leader


def entries_read(rank: int, counts: Sequence[int]) -> int:
    """Return how many entries a rank has behind its piece of a prompt, where pieces have these lengths."""
    place = place_of(rank, counts)
    return 0 if place is None else place.stop


def heads_of(share: Share) -> slice:
    """Return which key/value heads a rank holds."""
    return slice(*share.kv_heads)


def copy_heads(whole: KVCache, cache: KVCache, slot: int, layer: int, count: int, share: Share) -> None:
    """Copy a layer's first entries of one rank's heads from the only slot of a cache of all heads."""
    entries = torch.arange(count)
    places = [
        each.addresses(each.store.place_of_layer[layer][0], torch.tensor(at), entries)
        for each, at in ((whole, 0), (cache, slot))
    ]
    for theirs, own in zip(whole.store.stored(layer), cache.store.stored(layer), strict=True):
        own.index_copy_(1, places[1], theirs[heads_of(share)].index_select(1, places[0]))

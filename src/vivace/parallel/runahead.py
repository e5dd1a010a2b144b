"""KV-Runahead: every rank reads a piece of the prompt, and entries run along a chain of ranks (Cho et al. 2024).

All ranks hold the whole model. Rank 1 reads the first piece, the next ranks those behind it, and rank 0, which decodes,
the last. In every layer a rank stores the keys and values of its own piece, receives those of all pieces in front of it
from the rank before it, sends both on, and only then attends. What is sent are the cache's own entries, read from where
they lie and received where they will lie; receiving goes on in a thread beside the computation.

Pieces begin at multiples of the chunk length of a session, and chunks attend as they do in one process. So the entries
that rank 0 ends with are those that one process writes, bit for bit.

**Where we differ from the paper:** no rank computes the attention of the last layer, since the last token of a prompt
is the first that is decoded; and layers with a sliding window send only what later pieces can see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.seams import Drafter
from vivace.core.split_layers import SplitModules, split_layers
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.decode.prefill import PrefillState
from vivace.parallel import passes
from vivace.parallel.exchange import (
    ChainExchange,
    ChainPlace,
    DenseRows,
    Exchange,
    GatherExchange,
    place_of,
)
from vivace.parallel.measuring import BusyLink, cache_of, costs_of_ranks, link_speed, rank_times
from vivace.parallel.partition import Costs, balanced, even
from vivace.parallel.partition_table import Table
from vivace.parallel.relay import run_stage
from vivace.parallel.whole_prompts import WholePrompts
from vivace.parallel.world import World

KIND = "runahead"

CHAIN, GATHER, GATHER_DENSE, STAGES = range(4)
"""How a prompt is read together: along a chain, with entries gathered by all ranks in every layer, or in stages."""
WAYS = {"runahead": CHAIN, "sequence": GATHER_DENSE, "sequence-causal": GATHER, "pipeline-gathered": STAGES}
"""Ways by the name that users write. "sequence" is the baseline of the KV-Runahead paper: every row attends to the
whole prompt and what it must not see is masked afterwards; the causal form leaves that work out. In
"pipeline-gathered" ranks read in stages of layers, and entries end at rank 0 (``relay.py``)."""
ALONE = "one"
"""Stands for reading by rank 0 alone, in chunks."""


class RunaheadPrefill:
    """Implements ``Prefill``: prompts of more than one chunk are read by several ranks at once."""

    name = "full"
    is_exact = False
    """Entries are those of a full prefill, but there are no residuals of the prompt for a prefix cache."""
    drafter: Drafter | None = None

    def __init__(self, world: World, way: str = "runahead", table: Table | None = None) -> None:
        """Read among the ranks of a world, of which this process is rank 0, in one of ``WAYS`` or ``ALONE``."""
        self.world = world
        self.way = way
        self.table = table
        """Boundaries that were searched on this machine; None computes them from ``costs``."""
        self.costs: Costs | None = None
        """What was measured while all ranks computed; None counts multiplications."""
        self.alone: Costs | None = None
        """What was measured while the other ranks were idle."""
        self.times_masked = False
        """Whether attention with a mask afterwards is measured, too, for comparing."""
        self.fixed: Sequence[int] | None = None
        """Lengths of the pieces where somebody has set them."""
        self.turn: AbstractContextManager[object] = threading.RLock()
        """Held while ranks read together."""

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session."""
        return RunaheadState(self, model, cache, chunk)

    def counts(self, model: Decoder, length: int, chunk: int, way: str = KIND) -> list[int]:
        """Return the lengths of the pieces of a prompt, one for each rank that takes part."""
        num_ranks = min(self.world.size, -(-length // chunk))
        if self.fixed is not None and sum(self.fixed) == length:
            return list(self.fixed)
        if way != KIND or num_ranks < 2:
            return even(length, num_ranks, chunk)
        searched = None if self.table is None else self.table.counts(length, chunk, num_ranks)
        if searched is not None:
            return searched
        return balanced(length, num_ranks, chunk, self.costs or Costs.of(model.config))

    def way_for(self, model: Decoder, length: int, chunk: int) -> str:
        """Return how a prompt is read: as was asked for, or by rank 0 alone where it is no longer than a chunk."""
        return ALONE if length <= chunk else self.way

    def measure(self, model: Decoder) -> None:
        """Measure the link and a layer on all ranks, so that pieces are balanced for these machines."""
        link = link_speed(self.world)
        self.world.link = link
        self.costs, self.alone = costs_of_ranks(self.world, model, link, masked=self.times_masked)

    def read(
        self,
        model: Decoder,
        cache: KVCache,
        slot: int,
        tokens: Sequence[int],
        reading: PieceReading,
        receives: Callable[[int], None] | None = None,
    ) -> None:
        """Fill a slot with the entries of tokens, with the help of the other ranks.

        Args:
            model: the whole model.
            cache: has blocks for the slot's tokens, none of them committed.
            slot: whose entries they are.
            tokens: of the prompt.
            reading: how all ranks read them.
            receives: is given each layer once all its entries are there; stages give none.
        """
        world, (chunk, way, counts) = self.world, (reading.chunk, reading.way, reading.counts)
        with self.turn, world.unbroken():
            world.tell(passes.packed(passes.READ, [cache.prompts[slot], way, chunk, len(counts), *counts, *tokens]))
            if way == STAGES:
                run_stage(world, model, cache, slot, tokens, chunk)
                return
            place = place_of(0, counts)
            assert place is not None
            run_piece(world, model, cache, slot, tokens, place, reading, receives)


class RunaheadState(WholePrompts):
    """Reads the prompts of one session."""

    def __init__(self, prefill: RunaheadPrefill, model: Decoder, cache: KVCache, chunk: int) -> None:
        """Read into a session's cache, in chunks of ``chunk`` tokens."""
        super().__init__(model, cache, chunk)
        self._prefill = prefill

    def is_shared(self, count: int) -> bool:
        """Return whether it is read in another way than by this rank alone."""
        return self._prefill.way_for(self.model, count, self.chunk) != ALONE

    def read_together(self, slot: int, tokens: Sequence[int]) -> None:
        """Fill a slot with the entries of tokens."""
        way = self._prefill.way_for(self.model, len(tokens), self.chunk)
        counts = self._prefill.counts(self.model, len(tokens), self.chunk, way)
        self._prefill.read(self.model, self.cache, slot, tokens, PieceReading(self.chunk, WAYS[way], counts))


class RunaheadFollower:
    """Reads pieces of prompts until rank 0 has ended."""

    def __init__(self, world: World, decoder: Decoder) -> None:
        """Follow rank 0 with the whole model."""
        self._world = world
        self._decoder = decoder

    operations = frozenset((passes.READ, passes.ECHO, passes.TIME))

    def take(self, operation: int, numbers: list[int], rest: memoryview) -> None:
        """Do what rank 0 asks for."""
        if operation == passes.ECHO:
            self._world.links.send(0, 0, torch.zeros(numbers[0], dtype=torch.uint8), purpose="measuring")
            return
        if operation == passes.TIME:
            masked, *stream = numbers
            found = rank_times(self._world, self._decoder, BusyLink(*stream), masked=bool(masked))
            self._world.links.send(0, 0, found, purpose="measuring")
            return
        length, way, chunk, num_pieces, *more = numbers
        counts, tokens = more[:num_pieces], more[num_pieces:]
        self.read(length, tokens, PieceReading(chunk, way, counts))

    def read(self, length: int, tokens: Sequence[int], reading: PieceReading) -> KVCache | None:
        """Read this rank's part of a prompt.

        Args:
            length: of the whole prompt.
            tokens: of the prompt, without the last one.
            reading: how all ranks read it.

        Returns:
            A cache whose first slot has the entries up to the end of this rank's piece; None where it has no piece.
        """
        way, counts = reading.way, reading.counts
        place = place_of(self._world.rank, counts)
        if place is None and way != STAGES:
            return None
        stop = sum(counts) if place is None or way != CHAIN else place.stop
        cache = cache_of(self._decoder, stop)
        cache.prompts[0] = length
        if way == STAGES or place is None:
            run_stage(self._world, self._decoder, cache, 0, tokens, reading.chunk)
        else:
            run_piece(self._world, self._decoder, cache, 0, tokens, place, reading)
        self._world.links.flush()
        return cache


@dataclass(frozen=True)
class PieceReading:
    """How a prompt is read by all ranks."""

    chunk: int
    """Tokens that attend together; pieces begin at multiples of it."""
    way: int
    counts: Sequence[int]
    """Lengths of the pieces."""


def run_piece(
    world: World,
    decoder: Decoder,
    cache: KVCache,
    slot: int,
    tokens: Sequence[int],
    place: ChainPlace,
    reading: PieceReading,
    receives: Callable[[int], None] | None = None,
) -> None:
    """Compute one rank's piece of a prompt, and leave in its slot the entries of all tokens up to its end.

    Args:
        world: the ranks.
        decoder: the whole model.
        cache: has blocks for the slot's tokens up to the end of the piece, or of the prompt where entries are gathered;
            none of them is committed.
        slot: whose entries they are.
        tokens: of the prompt, at least up to the end of the piece.
        place: of this rank in the chain.
        reading: how all of them read.
        receives: is given each layer once all entries up to the end of the piece are there.
    """
    first, stop, chunk = place.first, place.stop, reading.chunk
    is_chunk = stop > decoder.backend.rows_up_to
    step = Step.at(cache, [slot] * (stop - first), list(range(first, stop)))
    chunks = tuple((slot, at - first, min(at + chunk, stop) - first) for at in range(first, stop, chunk))
    step = replace(step, is_prompt=True, chunk=chunks if is_chunk else None)
    own = torch.tensor(tokens[first:stop], dtype=torch.int64, device=decoder.device)
    layers: list[Layer] = list(decoder.layers)  # type: ignore[arg-type]
    exchange: Exchange
    if reading.way == CHAIN:
        exchange = ChainExchange(world, cache, slot, place)
    else:
        exchange = GatherExchange(world, cache, slot, place, reading.counts)
    dense = DenseRows(step, sum(reading.counts)) if reading.way == GATHER_DENSE else None
    split = split_layers(decoder, step) if dense is None else SplitModules(decoder)
    with nullcontext() if is_chunk else threads_of(decoder):
        h = decoder.embed(own, step)
        for layer in layers:
            q = split.project(h, step, layer.index)
            exchange.entries(layer.index)
            if receives is not None:
                receives(layer.index)
            if layer is layers[-1]:
                break
            if dense is None:
                h = split.finish(h, q, step, layer.index)
            else:
                h = layer.feed(layer.output(h, dense.read(layer, q), step), step)

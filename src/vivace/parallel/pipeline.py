"""A pipeline: every rank computes some neighbouring layers of every pass, and chunks of a prompt follow one another.

Rank 1 computes the first layers, the next ranks those behind them, and rank 0, which has the head, the last. While it
computes a chunk of a prompt, the ranks before it are busy with later ones. Decoding passes rank after rank, so it is no
faster than on one machine; keys and values stay where their layers are. All bits are those of one process.

This is the plain pipeline that others offer between machines; here it stands beside tensor parallelism and KV-Runahead
on the same kernels and links. In this version every rank reads the whole checkpoint, whichever layers it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from vivace.core.backend import Backend
from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.core.seams import Drafter, Memory, Span, Stateful
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.decode.prefill import PrefillState
from vivace.kernels.threads import one_pytorch_thread
from vivace.parallel import passes
from vivace.parallel.following import Follower
from vivace.parallel.leading import Leader, LedBackend, LedSpan
from vivace.parallel.links import MESSAGE
from vivace.parallel.whole_prompts import WholePrompts
from vivace.parallel.world import World

KIND = "pipeline"
PURPOSE = "rows"


def stage_of(rank: int, num_ranks: int, num_layers: int) -> tuple[int, int]:
    """Return the layers that a rank computes: the first, and one past the last."""
    place = rank - 1 if rank else num_ranks - 1
    return num_layers * place // num_ranks, num_layers * (place + 1) // num_ranks


def has_stages(config: ModelConfig, num_ranks: int) -> bool:
    """Return whether a model's layers can be divided into stages of so many ranks."""
    return config.moe is None and config.num_layers >= num_ranks


class PipelineParts(DenseParts):
    """Makes whole layers, and tells the leader about sessions."""

    def __init__(self, config: ModelConfig, leader: Leader | None) -> None:
        """Make layers; ``leader`` is None on ranks that follow."""
        super().__init__(config)
        self._leader = leader

    def stateful(self) -> Sequence[Stateful]:
        """Return the leader, which tells the other ranks what sessions do; nothing on a rank that follows."""
        return () if self._leader is None else (self._leader,)


class PipelineLeader(Leader):
    """Sends passes to all ranks, and their rows to the first stage."""

    def __init__(self, world: World, offset: int = 0) -> None:
        """Lead the other ranks of a world."""
        super().__init__(world, offset)
        self.count = 0
        """Number of passes that have begun."""

    def begin(self, h: Tensor, step: Step, start: int, stop: int) -> None:
        """Send a pass."""
        memory = step.memory
        number = self.number_of(memory) if isinstance(memory, KVCache) else None
        message = passes.pack_pass(step, number, start, stop, self.offset)
        for rank in self.world.others:
            rows = (h.contiguous(),) if rank == 1 else ()
            self.world.links.send(rank, 0, message, *rows, kind=MESSAGE, purpose=PURPOSE if rows else "messages")
        self.count += 1

    def result(self, number: int, like: Tensor) -> Tensor:
        """Wait for the rows that the stage before rank 0 has computed in a pass."""
        rows = torch.empty_like(like)
        self.world.links.receive(self.world.size - 1, number, rows)
        return rows


class PipelineBackend(LedBackend):
    """Implements ``Backend`` on rank 0: layers run on all ranks, those of rank 0 as its own backend runs them."""

    def __init__(self, inner: Backend, leader: PipelineLeader) -> None:
        """Take the backend of rank 0's layers."""
        super().__init__(inner, leader)
        self.keeps_codes = inner.keeps_codes  # layers are whole, and the other ranks keep theirs
        self._pipeline = leader

    def finish(self, decoder: Decoder) -> None:
        """Prepare the span over all ranks."""
        self.inner.finish(decoder)
        self.rows_up_to = self.inner.rows_up_to
        self.span = PipelineSpan(decoder, self._pipeline, self.inner.span)


class PipelineSpan(LedSpan):
    """Implements ``Span``: a pass goes through all ranks."""

    def __init__(self, decoder: Decoder, leader: PipelineLeader, inner: Span | None) -> None:
        """Run rank 0's layers as ``inner`` does where it can."""
        super().__init__(decoder, leader, inner)
        self.leader: PipelineLeader = leader

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1."""
        leader = self.leader
        with leader.turn, leader.world.unbroken():
            leader.begin(h, step, start, stop)
            return self.last(leader.result(leader.count, h), step, start, stop)

    def last(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows through those of the layers that are rank 0's."""
        first, end = stage_of(0, self.leader.world.size, len(self._layers))
        first, end = max(first, start), min(end, stop)
        return self.run_here(h, step, first, end) if first < end else h


class PipelineFollower(Follower):
    """Computes this rank's layers of every pass."""

    def __init__(self, world: World, decoder: Decoder, offset: int = 0) -> None:
        """Follow rank 0 with the whole model."""
        super().__init__(world, decoder, offset)
        self._stage = stage_of(world.rank, world.size, decoder.config.num_layers)
        self._count = 0

    def _run(self, numbers: list[int], rest: memoryview) -> None:
        world, decoder = self._world, self._decoder
        memory: Memory = self._memory_of(numbers)
        step, start, stop = passes.unpack_pass(numbers, memory)
        self._count += 1
        if world.rank == 1:
            h = passes.rows_of(rest, step.num_rows, decoder.dtype)
        else:
            h = torch.empty(step.num_rows, decoder.config.width, dtype=decoder.dtype)
            world.links.receive(world.rank - 1, self._count, h)
        first, end = max(self._stage[0], start), min(self._stage[1], stop)
        if first < end:
            with one_pytorch_thread() if self._is_native else nullcontext():
                h = decoder.run(h, step, first, end)
        world.links.send((world.rank + 1) % world.size, self._count, h.contiguous(), purpose=PURPOSE)


class PipelinePrefill:
    """Implements ``Prefill``: chunks of a prompt follow one another through the ranks."""

    name = "full"
    is_exact = False
    """Entries are those of a full prefill, but those of most layers are on other ranks."""
    drafter: Drafter | None = None

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session; a chunk is never divided by layers, which ranks have divided already."""
        return _PipelineState(self, model, cache, chunk)


class _PipelineState(WholePrompts):
    """Reads the prompts of one session in chunks that overlap."""

    def __init__(self, prefill: PipelinePrefill, model: Decoder, cache: KVCache, chunk: int) -> None:
        super().__init__(model, cache, chunk)
        self._prefill = prefill

    def is_shared(self, count: int) -> bool:
        """Return whether there is more than one chunk, so that chunks can follow one another."""
        return count > self.chunk

    def read_together(self, slot: int, tokens: Sequence[int]) -> None:
        """Send all chunks on their way, and compute this rank's layers of each as it arrives."""
        with self._prefill.lock:
            read_chunks(self.model, self.cache, slot, tokens, self.chunk)


def read_chunks(model: Decoder, cache: KVCache, slot: int, tokens: Sequence[int], chunk: int) -> None:
    """Send all chunks of a prompt through the stages, and compute rank 0's layers of each as it arrives.

    Args:
        model: runs layers in stages.
        cache: has blocks for the slot's tokens, none of them committed.
        slot: whose entries they are; every rank ends with those of its own layers.
        tokens: of the prompt.
        chunk: tokens that attend together.
    """
    span = model.backend.span
    assert isinstance(span, PipelineSpan)
    leader, num_layers = span.leader, model.config.num_layers
    is_chunk = len(tokens) > model.backend.rows_up_to
    with leader.turn, nullcontext() if is_chunk else threads_of(model), leader.world.unbroken():
        waiting = []
        for first in range(0, len(tokens), chunk):
            stop = min(first + chunk, len(tokens))
            step = Step.at(cache, [slot] * (stop - first), list(range(first, stop)))
            step = replace(step, is_prompt=True, chunk=((slot, 0, stop - first),) if is_chunk else None)
            h = model.embed(torch.tensor(tokens[first:stop], dtype=torch.int64), step)
            leader.begin(h, step, 0, num_layers)
            waiting.append((leader.count, step, h))
        for number, step, h in waiting:
            span.last(leader.result(number, h), step, 0, num_layers)

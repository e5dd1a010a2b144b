"""How fast ranks compute a layer, how fast a link is, and what it takes from them: measured while a model is loaded."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.split_layers import split_layers
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.parallel import passes
from vivace.parallel.collective import LinkedSum
from vivace.parallel.exchange import DenseRows
from vivace.parallel.links import HEADER, MESSAGE
from vivace.parallel.partition import Costs
from vivace.parallel.world import World

ROWS = 256
"""Rows whose passage through a layer is timed, as many as a chunk of a prompt has."""
BEFORE = (0, 768, 3840)
"""Entries in front of them that they read, where the model's context is that long."""
TIMES = 3
ECHO_BYTES = 1 << 20
WORK_S = 0.1
"""How long each part of a layer is timed: as long as one period of the kernel's scheduler of parts of a core."""
STREAM_S = 0.15
"""For how long ranks compute beside a stream between them."""
MOST_STREAM_BYTES = 16 << 20
SUMS = 4
"""Sums over the ranks that are timed together, each behind a layer."""


@dataclass(frozen=True)
class LinkSpeed:
    """The link between two ranks."""

    latency_s: float
    """Half of the time of a small message there and back."""
    bytes_per_s: float

    @staticmethod
    def of(small_s: float, large_s: float, num_bytes: int) -> LinkSpeed:
        """Return the speed from the times of a small frame there and back, and with ``num_bytes`` more on the way."""
        return LinkSpeed(small_s / 2, num_bytes / max(large_s - small_s, 1e-6))


def link_speed(world: World) -> LinkSpeed:
    """Let rank 1, which follows, send back small frames and a large one."""

    def echo_s(size: int) -> float:
        into = torch.empty(size, dtype=torch.uint8)
        started = time.perf_counter()
        world.links.send(1, 0, passes.packed(passes.ECHO, [size]), kind=MESSAGE, purpose="measuring")
        world.links.receive(1, 0, into)
        return time.perf_counter() - started

    small = min(echo_s(1) for _ in range(2 * TIMES))
    large = min(echo_s(ECHO_BYTES) for _ in range(2))
    return LinkSpeed.of(small, large, ECHO_BYTES)


def confirm_received(world: World) -> tuple[int, int]:
    """Wait until every other rank has received all that this one has sent to it, and this one what they sent before.

    A frame that is handed to the system may wait in the buffer of a socket or before a slow link. Frames of one link
    keep their order, so the answer to a small one says that all before it have arrived.

    Returns:
        Bytes that this rank has sent and received for that, headers of frames included.
    """
    message, answer = passes.packed(passes.ECHO, [1]), torch.empty(1, dtype=torch.uint8)
    for rank in world.others:
        world.links.send(rank, 0, message, kind=MESSAGE, purpose="measuring")
    for rank in world.others:
        world.links.receive(rank, 0, answer)
    num_others = len(world.others)
    return num_others * (HEADER.size + len(message)), num_others * (HEADER.size + answer.nbytes)


def costs_of_ranks(world: World, decoder: Decoder, link: LinkSpeed, *, masked: bool = False) -> tuple[Costs, Costs]:
    """Return what a layer takes on the slowest rank while all of them compute, and on this one while the others wait.

    Args:
        world: the ranks; the others follow.
        decoder: the whole model.
        link: to rank 1.
        masked: whether attention with a mask afterwards is timed, too.
    """
    own = layer_times(decoder, masked=masked)
    alone = torch.cat([torch.zeros(3, dtype=torch.float64), own])
    rows, places = places_of(decoder)
    stream = BusyLink.of(link, float(own[0] + own[1] + own[3 + len(places) // 2]) * rows)
    world.tell(passes.packed(passes.TIME, [int(masked), *stream]))
    found = [rank_times(world, decoder, stream, masked=masked)]
    for rank in world.others:
        found.append(torch.empty_like(alone))
        world.links.receive(rank, 0, found[-1])
    slowest = torch.stack(found).amax(0)
    return costs_from(slowest, decoder, link, masked=masked), costs_from(alone, decoder, link, masked=masked)


class BusyLink(NamedTuple):
    """What rank 1 sends to rank 0 while all ranks compute."""

    num_bytes: int
    num_passes: int
    """How often a chunk passes a layer beside it."""

    @staticmethod
    def of(link: LinkSpeed, pass_s: float) -> BusyLink:
        """Return what takes about as long as ``STREAM_S``, or less where the link is fast."""
        num_bytes = max(1, min(MOST_STREAM_BYTES, round(link.bytes_per_s * STREAM_S)))
        return BusyLink(num_bytes, 1 + round(num_bytes / link.bytes_per_s / pass_s))


def rank_times(world: World, decoder: Decoder, stream: BusyLink, *, masked: bool) -> Tensor:
    """Return the seconds of a sum over all ranks, for a row of a chunk and a row alone, those that a byte on the link
    takes from a rank that computes, and those of ``layer_times``.

    All ranks call this at once.
    """
    layer = layer_times(decoder, masked=masked)
    found = [sum_time(world, decoder, count) / count for count in (places_of(decoder)[0], 1)]
    found.append(byte_work_s(world, decoder, stream))
    world.links.flush()
    return torch.cat([torch.tensor(found, dtype=torch.float64), layer])


@torch.inference_mode()
def sum_time(world: World, decoder: Decoder, count: int) -> float:
    """Return the seconds of a sum over all ranks for so many rows, behind a layer, as sums come.

    There the slowest rank is awaited, and a link has rested. All ranks call this at once.
    """
    collective, index = LinkedSum(world), decoder.config.num_layers // 2
    cache = cache_of(decoder, count)
    step, h = chunk_of(decoder, cache, count, 0)

    def passed(*, sums: bool) -> None:
        for _ in range(SUMS):
            rows = decoder.run(h, step, index, index + 1)
            if sums:
                collective.all_reduce(rows, point=(0, "o"))

    with nullcontext() if step.chunk else threads_of(decoder):
        collective.all_reduce(h, point=(0, "o"))  # nobody is awaited behind it
        alone_s, summed_s, bare_s = (
            _median_s(work)
            for work in (
                lambda: passed(sums=False),
                lambda: passed(sums=True),
                lambda: collective.all_reduce(h, point=(0, "o")),
            )
        )
    cache.release([0])
    return (summed_s - alone_s) / SUMS if summed_s > alone_s else bare_s


@torch.inference_mode()
def byte_work_s(world: World, decoder: Decoder, stream: BusyLink) -> float:
    """Return how much longer a rank computes for each byte that is sent or received beside it, in seconds.

    Packets are made and taken apart by the cores that compute. Rank 1 sends and rank 0 receives, as two neighbours of a
    chain do; other ranks compute beside them, and return 0.
    """
    (rows, places), collective = places_of(decoder), LinkedSum(world)
    before, layer = places[len(places) // 2], decoder.layers[decoder.config.num_layers // 2]
    cache = cache_of(decoder, before + rows)
    step, h = chunk_of(decoder, cache, rows, before)
    payload = torch.zeros(stream.num_bytes, dtype=torch.uint8)

    def passes_s(*, beside_stream: bool) -> float:
        collective.all_reduce(h[:1], point=(0, "o"))  # so that all begin at once
        receiving = threading.Thread(target=world.links.receive, args=(1, 0, payload))
        begun = time.perf_counter()
        if beside_stream and world.rank == 1:
            world.links.send(0, 0, payload, purpose="measuring")
        if beside_stream and world.rank == 0:
            receiving.start()
        for _ in range(stream.num_passes):
            layer(h, step)
        taken = time.perf_counter() - begun
        if beside_stream and world.rank == 0:
            receiving.join()
        return taken

    with nullcontext() if step.chunk else threads_of(decoder):
        quiet, busy = (
            statistics.median(passes_s(beside_stream=beside) for _ in range(TIMES)) for beside in (False, True)
        )
    cache.release([0])
    return max(0.0, busy - quiet) / stream.num_bytes if world.rank < 2 else 0.0


def cache_of(decoder: Decoder, size: int) -> KVCache:
    """Return a cache with one slot, in which so many entries have their places."""
    cache = decoder.new_cache(1, size)
    cache.set_aside(0, size)
    cache.extend([0], [size])
    return cache


def chunk_of(decoder: Decoder, cache: KVCache, rows: int, before: int) -> tuple[Step, Tensor]:
    """Return the step of a prompt's chunk behind some entries of a slot, and its rows as they enter the model."""
    step = replace(Step.at(cache, [0] * rows, list(range(before, before + rows))), is_prompt=True)
    is_chunk = before + rows > decoder.backend.rows_up_to
    step = replace(step, chunk=((0, 0, rows),) if is_chunk else None)
    return step, decoder.embed(torch.arange(rows) % decoder.config.vocab_size, step)


def places_of(decoder: Decoder) -> tuple[int, list[int]]:
    """Return how many rows are timed, and how many entries lie in front of them, in order."""
    most = decoder.config.max_positions
    rows = min(ROWS, max(1, most // 4))
    return rows, sorted({min(before, most - rows) for before in BEFORE})


@torch.inference_mode()
def layer_times(decoder: Decoder, *, masked: bool) -> Tensor:
    """Return the seconds that one layer in the middle of a model takes here, as prompts are read.

    Returns:
        Of one row each, in float64: projections, what follows attention, a step that decodes one token, attention at
        each of ``places_of``, and, where ``masked``, attention at each of them with a mask afterwards.
    """
    rows, places = places_of(decoder)
    most, layer = places[-1] + rows, decoder.layers[decoder.config.num_layers // 2]
    assert isinstance(layer, Layer)
    cache = cache_of(decoder, most)
    reading, masking = [], []
    for before in places:
        step, h = chunk_of(decoder, cache, rows, before)
        with nullcontext() if step.chunk else threads_of(decoder):
            q = layer.project(h, step)
            reading.append(_mean_s(lambda: layer.read(q, step)) / rows)  # noqa: B023 - called at once
            if masked:
                dense = DenseRows(step, before + rows)
                masking.append(_mean_s(lambda: dense.read(layer, q)) / rows)  # noqa: B023 - likewise
    step, h = chunk_of(decoder, cache, rows, places[0])  # where attention is the least of what follows
    split = split_layers(decoder, step)
    with threads_of(decoder):
        project_s = _mean_s(lambda: split.project(h, step, layer.index)) / rows
        projected = split.project(h, step, layer.index)
        finish_s = _mean_s(lambda: split.finish(h, projected, step, layer.index)) / rows
        feed_s = finish_s - reading[0] if finish_s > reading[0] else finish_s
        one = Step.at(cache, [0], [places[0]])
        row = decoder.embed(torch.zeros(1, dtype=torch.int64), one)
        step_s = _mean_s(lambda: decoder.run(row, one, layer.index, layer.index + 1))
    cache.release([0])
    return torch.tensor([project_s, feed_s, step_s, *reading, *masking], dtype=torch.float64)


@torch.inference_mode()
def token_times(decoder: Decoder) -> tuple[float, float]:
    """Return the seconds that the layers take for one token: on rank 0 alone, and in stages on all ranks."""
    cache = cache_of(decoder, 1)
    step = Step.at(cache, [0], [0])
    h = decoder.embed(torch.zeros(1, dtype=torch.int64), step)
    with threads_of(decoder):
        alone_s = _mean_s(lambda: decoder.run(h, step))
        cache.staged.add(0)
        staged_s = _mean_s(lambda: decoder.run(h, step))
    return alone_s, staged_s


def costs_from(times: Tensor, decoder: Decoder, link: LinkSpeed, *, masked: bool) -> Costs:
    """Return costs from ``rank_times`` and the speed of a link."""
    config, (rows, places) = decoder.config, places_of(decoder)
    sum_s, sum_step_s, byte_s, project_s, feed_s, step_s, *more = times.tolist()
    seen = [before + rows / 2 for before in places]
    entry_bytes = _entry_bytes(decoder)
    return Costs(
        project_s,
        feed_s,
        more[len(seen) - 1] / seen[-1],
        config.num_layers,
        link.latency_s,
        entry_bytes / link.bytes_per_s,
        config.width * decoder.dtype.itemsize / link.bytes_per_s,
        attention=tuple(zip(seen, more, strict=False)),
        masked=tuple(zip((before + rows for before in places), more[len(seen) :], strict=True)) if masked else (),
        step_s=step_s,
        sum_s=sum_s,
        sum_step_s=sum_step_s,
        entry_work_s=entry_bytes * byte_s,
    )


def _entry_bytes(decoder: Decoder) -> int:
    cache = decoder.new_cache(1, 1)
    return cache.store.specs[0].entry_bytes(decoder.dtype)


def _mean_s(work: Callable[[], object]) -> float:
    """Return how long some work takes: the mean over ``WORK_S``, since a rank that has a part of a core pauses now and
    then.
    """
    work()
    started, count = time.perf_counter(), 0
    while count < TIMES or time.perf_counter() - started < WORK_S:
        work()
        count += 1
    return (time.perf_counter() - started) / count


def _median_s(work: Callable[[], object]) -> float:
    """Return how long work takes that all ranks do equally often."""
    found = []
    for _ in range(TIMES):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)

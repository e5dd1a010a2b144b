"""How fast this rank computes a layer and how fast a link is, measured once while a model is loaded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.parallel import passes
from vivace.parallel.links import HEADER, MESSAGE
from vivace.parallel.partition import Costs
from vivace.parallel.world import World

ROWS = 128
"""Rows whose passage through a layer is timed."""
ENTRIES = 1024
"""Entries in front of them that they read, where the model's context is that long."""
TIMES = 3
ECHO_BYTES = 1 << 20


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


@torch.inference_mode()
def layer_costs(decoder: Decoder, link: LinkSpeed) -> Costs:
    """Return what one layer in the middle of a model takes here, and its entries on a link."""
    config = decoder.config
    rows = min(ROWS, config.max_positions // 2)
    before = min(ENTRIES, config.max_positions - rows)
    cache = decoder.new_cache(1, before + rows)
    cache.set_aside(0, before + rows)
    cache.extend([0], [before + rows])
    step = Step.at(cache, [0] * rows, list(range(before, before + rows)))
    layer = decoder.layers[config.num_layers // 2]
    assert isinstance(layer, Layer)
    h = decoder.embed(torch.arange(rows) % config.vocab_size, step)
    with threads_of(decoder):
        q = layer.project(h, step)
        a = layer.read(q, step)
        project_s = _median_s(lambda: layer.project(h, step)) / rows
        attend_s = _median_s(lambda: layer.read(q, step)) / (rows * (before + rows / 2))
        feed_s = _median_s(lambda: layer.feed(layer.output(h, a, step), step)) / rows
    cache.release([0])
    entry_bytes = cache.store.specs[0].entry_bytes(decoder.dtype)
    return Costs(project_s, feed_s, attend_s, config.num_layers, link.latency_s, entry_bytes / link.bytes_per_s)


def _median_s(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    found = []
    for _ in range(TIMES):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)

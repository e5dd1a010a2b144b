"""The machines of a world and the links between all pairs of them, examined one pair after another.

Rank 0 says whose turn it is, so that no other traffic is on the way while a pair measures. The rank of a pair with the
smaller number sends frames that the other sends back; both directions count.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch

from vivace.errors import WorldError
from vivace.parallel.links import MESSAGE
from vivace.parallel.measuring import LinkSpeed
from vivace.parallel.world import END, World

SMALL, LARGE = 1, 1 << 20
"""Bytes of the frames whose way there and back is timed."""
SMALL_TIMES, LARGE_TIMES = 20, 3
_PURPOSE = "examining"
_TURN = struct.Struct("<4sII")
_PAIR = b"pair"


@dataclass(frozen=True)
class LinkFound:
    """The link between two ranks."""

    first: int
    second: int
    latency_s: float
    """Half of the time of a byte there and back."""
    bytes_per_s: float
    """Bytes of a large frame in one direction."""


def examine(world: World, facts: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[LinkFound]]:
    """Return what all ranks say of themselves, and every link; every rank calls this, and only rank 0 gets an answer.

    Args:
        world: the ranks.
        facts: what this rank says of itself, as JSON has it.

    Raises:
        WorldError: a rank ended or hangs.
    """
    if not world.leads:
        world.links.send(0, 0, json.dumps(dict(facts)).encode(), kind=MESSAGE, purpose=_PURPOSE)
        _take_turns(world)
        return [], []
    machines = [dict(facts), *(json.loads(bytes(world.links.message(rank))) for rank in world.others)]
    found = []
    for first, second in combinations(range(world.size), 2):
        turn = _TURN.pack(_PAIR, first, second)
        for rank in {first, second} - {0}:
            world.links.send(rank, 0, turn, kind=MESSAGE, purpose=_PURPOSE)
        if first == 0:
            found.append(_measured(world, second))
        else:
            found.append(LinkFound(**json.loads(bytes(world.links.message(first)))))
    return machines, found


def _take_turns(world: World) -> None:
    """Measure links, or send frames back, whenever rank 0 says so, until it ends the world."""
    while True:
        message = bytes(world.links.message(0))
        if message == END:
            return
        kind, first, second = _TURN.unpack(message)
        if kind != _PAIR or world.rank not in (first, second):
            raise WorldError(f"rank {world.rank} was told {message[:16]!r} while links are examined")
        if world.rank == first:
            answer = json.dumps(asdict(_measured(world, second))).encode()
            world.links.send(0, 0, answer, kind=MESSAGE, purpose=_PURPOSE)
        else:
            _send_back(world, first)


def _measured(world: World, other: int) -> LinkFound:
    """Return how fast the link to a rank is that sends everything back."""
    small = min(_there_and_back_s(world, other, SMALL) for _ in range(SMALL_TIMES))
    large = min(_there_and_back_s(world, other, LARGE) for _ in range(LARGE_TIMES))
    speed = LinkSpeed.of(small, large, 2 * (LARGE - SMALL))
    return LinkFound(world.rank, other, speed.latency_s, speed.bytes_per_s)


def _there_and_back_s(world: World, other: int, size: int) -> float:
    frame = torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    world.links.send(other, 0, frame, purpose=_PURPOSE)
    world.links.receive(other, 0, frame)
    return time.perf_counter() - began


def _send_back(world: World, other: int) -> None:
    for size in (*[SMALL] * SMALL_TIMES, *[LARGE] * LARGE_TIMES):
        frame = torch.empty(size, dtype=torch.uint8)
        world.links.receive(other, 0, frame)
        world.links.send(other, 0, frame, purpose=_PURPOSE)

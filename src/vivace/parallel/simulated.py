"""Ranks in one process: every rank is a thread with its own share of the model and its own links.

Each thread loads its share and follows rank 0 through the code of real ranks, over sockets of the loopback interface.
Only sums do not travel: the threads meet, and one of them adds what all of them would have sent (``meeting.py``). So
what a simulated world computes is what a real one computes, bit for bit. It is for measuring quality and for
calibrating, with any number of ranks; its speed says nothing, and its links count no sums.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations

import torch

from vivace.core.model import Decoder
from vivace.decode.prefill import FULL
from vivace.errors import ConfigError, WorldError
from vivace.parallel.collective import Wire
from vivace.parallel.following import Follower, follow
from vivace.parallel.links import Links
from vivace.parallel.loading import LoadOptions, SharedLoading, load_share
from vivace.parallel.meeting import Meeting, MetSum
from vivace.parallel.world import World

MOST_RANKS = 16
END_S = 10.0
"""Most seconds for which the end waits for the thread of a rank."""
SILENCE_S = 3600.0
"""Seconds without an answer after which a rank is said to hang: ranks share the cores of a process that may be busy."""


def simulated_worlds(num_ranks: int) -> list[World]:
    """Return a world for each of several ranks of this process, connected by sockets."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for low, high in combinations(range(num_ranks), 2):
            connections[high][low] = socket.create_connection(listening.getsockname())
            connections[low][high] = listening.accept()[0]
    return [World(rank, num_ranks, Links(rank, of, SILENCE_S)) for rank, of in enumerate(connections)]


class SimulatedLoading(SharedLoading):
    """Loads a model that is shared by threads of this process: ``vivace.load(path, parallel=SimulatedLoading(4))``.

    PyTorch computes with one thread in every rank, also in the thread that calls.
    """

    def __init__(self, num_ranks: int, wire: str | Callable[[int], Wire] = "same") -> None:
        """Share among so many ranks.

        Args:
            num_ranks: number of threads.
            wire: form of sums by its name, or what returns it for a rank.

        Raises:
            ConfigError: the number is below 2 or above 16.
        """
        if not 2 <= num_ranks <= MOST_RANKS:
            raise ConfigError(f"simulated ranks are 2 to {MOST_RANKS}, found {num_ranks}")
        self._worlds = simulated_worlds(num_ranks)
        self._wire = wire
        super().__init__(self._worlds[0], "tensor", wire if isinstance(wire, str) else "watched")
        self.prefill = FULL

    def load(self, options: LoadOptions) -> Decoder:
        """Load the shares of all ranks, let all but the first follow it, and return that of the first.

        Raises:
            ConfigError: so many ranks cannot share the model.
            UnsupportedError: such a model is not shared.
            MismatchError: a calibration is of something else.
        """
        torch.set_num_threads(1)
        try:
            decoders, meeting = [], Meeting(len(self._worlds))
            for world in self._worlds:
                wire = self._wire if isinstance(self._wire, str) else self._wire(world.rank)
                decoders.append(load_share(world, wire, options, MetSum(world, meeting)))
                decoders[-1].store_entries(options.kv)
        except BaseException:
            for world in self._worlds:
                world.links.close()
            raise
        leading, *others = decoders
        threads = [
            threading.Thread(target=_follow, args=(world, decoder), name=f"vivace-rank-{world.rank}", daemon=True)
            for world, decoder in zip(self._worlds[1:], others, strict=True)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(leading, _end, self.world, threads)
        return leading


def _end(world: World, threads: Sequence[threading.Thread]) -> None:
    """End the ranks, and wait for their threads: Python, when it ends, aborts with those that compute."""
    world.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(END_S)


def _follow(world: World, decoder: Decoder) -> None:
    """Follow rank 0 in this thread until it ends; rank 0 says what goes wrong."""
    torch.set_num_threads(1)
    try:
        with suppress(WorldError):
            follow(world, Follower(world, decoder))
    except Exception as error:  # noqa: BLE001 - told to rank 0, which raises it
        with suppress(WorldError):
            world.links.fail(f"rank {world.rank}: {type(error).__name__}: {error}")
    finally:
        world.links.close()

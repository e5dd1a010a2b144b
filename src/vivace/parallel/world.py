"""The ranks of one model: how they find one another, what they compare, and how they end together.

A world is started by torchrun, which gives every process its rank, their number and an address where they meet. There
each rank publishes the address of a socket of its own, and every pair connects. From then on ranks talk through
``links.py``.

Rank 0 leads: it reads, decides and answers. The other ranks follow its messages until it ends. A rank that cannot go on
says why to all others before it ends; one that dies or hangs is noticed by those that wait for it.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed.rendezvous import rendezvous

from vivace.errors import ConfigError, VivaceError, WorldError
from vivace.parallel.links import MESSAGE, Links

TIMEOUT_S = 120.0
"""Seconds without an answer after which a rank is said to hang, unless the user says otherwise."""
MOST_TIMEOUT_S = (2**31 - 1) // 1000
"""Longest time that can be set: sockets wait for a number of milliseconds of 32 bits, which are 24 days."""
LOOPBACK = "127.0.0.1"
END = b"end"
"""The message with which rank 0 releases the others."""
_HELLO = struct.Struct("<16sI")
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_joined: list[World] = []
"""The world of this process, once it has joined one."""


class World:
    """This process as one of several ranks."""

    def __init__(self, rank: int, size: int, links: Links) -> None:
        """Take over links to all other ranks."""
        self.rank = rank
        self.size = size
        self.links = links
        self.link: object | None = None
        """How fast the link to rank 1 is, where it was measured (``LinkSpeed``)."""
        self.wire: Any = None
        """The form in which sums travel (``Wire``); None where nothing is summed."""
        self.store: object | None = None
        """Where the ranks have met; rank 0 may hold it while the others still read."""

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0, which decides."""
        return self.rank == 0

    @property
    def others(self) -> tuple[int, ...]:
        """Return all other ranks, in order."""
        return tuple(self.links.of)

    @property
    def has_ended(self) -> bool:
        """Return whether the ranks can no longer be reached."""
        return self.links.failure is not None

    @property
    def traffic(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what this rank has sent, by receiver and purpose: frames, and bytes without their headers."""
        found = self.links.traffic()
        return {
            rank: {purpose: {"frames": each.frames, "bytes": each.num_bytes} for purpose, each in by.items()}
            for rank, by in found.items()
        }

    @property
    def saturation(self) -> float | None:
        """Return the share of numbers that codes of four bits clipped on this rank; None without such codes."""
        found: float | None = getattr(self.wire, "saturation", None)
        return found

    def is_whole(self) -> bool:
        """Return whether all ranks are there, as far as can be seen without waiting."""
        with suppress(WorldError):
            self.links.look()
        return not self.has_ended

    def tell(self, *parts: Any) -> None:
        """Send a message to all other ranks.

        Raises:
            WorldError: a rank is gone.
        """
        for rank in self.others:
            self.links.send(rank, 0, *parts, kind=MESSAGE, purpose="messages")

    def compare(self, facts: Mapping[str, object]) -> None:
        """Compare what all ranks must have in common; every rank calls this at the same place.

        However long another rank takes to come here, it is waited for: it may still fetch or read its files.

        Raises:
            WorldError: a rank differs from rank 0, which names it and says in what.
        """
        own = json.dumps(dict(facts)).encode()
        if not self.leads:
            self.links.send(0, 0, own, kind=MESSAGE, purpose="messages")
            if bytes(self.links.message(0, is_idle=True)) != b"agreed":
                self.links.fail(f"rank 0 did not answer rank {self.rank}")
            return
        for rank in self.others:
            theirs = json.loads(bytes(self.links.message(rank, is_idle=True)))
            for name, value in facts.items():
                if theirs.get(name) != value:
                    self.links.fail(
                        f"rank {rank} has {name} {theirs.get(name)!r}, rank 0 has {value!r}; "
                        "start all ranks with the same package, checkpoint and flags"
                    )
        self.tell(b"agreed")

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """End all ranks if the block fails on this one; only rank 0 raises the error, the others end with status 1."""
        try:
            yield
        except WorldError:
            if self.leads:
                raise
            sys.exit(1)
        except Exception as error:
            told = str(error) if isinstance(error, VivaceError) else f"{type(error).__name__}: {error}"
            with suppress(WorldError):
                self.links.fail(f"rank {self.rank}: {' '.join(told.split())}")
            if self.leads:
                raise
            sys.exit(error.exit_code if isinstance(error, VivaceError) else 1)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """End all ranks for the error with which the block fails: the others are in the middle of what it does."""
        try:
            yield
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def close(self, reason: str | None = None) -> None:
        """End the ranks: those that follow end with status 0, or with 1 where there is a reason."""
        if self.has_ended:
            return
        with suppress(WorldError):
            if reason is not None:
                self.links.fail(f"rank 0: {reason}")
            if self.leads:
                self.tell(END)
            self.links.flush()
        self.links.close()


def is_launched() -> bool:
    """Return whether torchrun, or something that sets what it sets, has started this process."""
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"))


def join(*, interface: str | None = None, timeout_s: float | None = None) -> World:
    """Meet the other ranks that torchrun has started.

    Args:
        interface: network interface through which ranks talk, such as "eth0"; None is the loopback interface.
        timeout_s: seconds without an answer after which a rank is said to hang; None is ``TIMEOUT_S``.

    Raises:
        ConfigError: this process was not started by torchrun, or has joined already; there is no such interface.
        WorldError: the ranks do not find one another.
    """
    if _joined:
        raise ConfigError("this process has loaded a model on several ranks already; one process holds one such model")
    limit = TIMEOUT_S if timeout_s is None else timeout_s
    if not 0 < limit <= MOST_TIMEOUT_S:
        raise ConfigError(f"timeout must be a number of seconds above 0 and at most {MOST_TIMEOUT_S}, found {limit:g}")
    missing = [name for name in _MEETING if name not in os.environ]
    if missing:
        raise ConfigError(
            "a model on several ranks is started by torchrun, which sets RANK and WORLD_SIZE: "
            "torchrun --nproc-per-node 2 -m vivace ..."
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise ConfigError("torchrun started one process; give --nproc-per-node 2 or more, or leave out --parallel")
    address = LOOPBACK if interface is None else address_of(interface)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if interface is None and num_here < size:
        raise ConfigError(
            f"{size - num_here} of {size} ranks are on other machines; name the network that they share: "
            "--link-interface, such as eth0"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit)))
        world = World(rank, size, Links(rank, _connected(store, rank, size, address, limit), limit, linger_s=limit))
        world.store = store
    except (torch.distributed.DistError, RuntimeError, OSError) as error:
        raise WorldError(f"rank {rank} does not find the others: {' '.join(str(error).split())[:200]}") from error
    _joined.append(world)
    atexit.register(_leave_at_exit)
    return world


def leave(reason: str | None = None) -> None:
    """End the ranks of this process's world if there is one: the command has ended, for a reason or well."""
    for world in _joined:
        world.close(reason)


def _leave_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    leave(None if error is None else f"{type(error).__name__}: {error}")


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    import fcntl

    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(f"there is no network interface {interface!r} here; there are {', '.join(names)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise ConfigError(f"the network interface {interface!r} has no IPv4 address") from error
    return socket.inet_ntoa(found[20:24])


def _connected(store: Any, rank: int, size: int, address: str, timeout_s: float) -> dict[int, socket.socket]:
    """Return a connection to every other rank: each connects to those below it and waits for those above."""
    stem = f"vivace/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(f"{stem}/word", secrets.token_hex(16))
    word = bytes.fromhex(store.get(f"{stem}/word").decode())
    found: dict[int, socket.socket] = {}
    with socket.create_server((address, 0), backlog=size) as listening:
        listening.settimeout(timeout_s)
        store.set(f"{stem}/{rank}", json.dumps([address, listening.getsockname()[1]]))
        for other in range(rank):
            host, port = json.loads(store.get(f"{stem}/{other}"))
            connection = socket.create_connection((host, port), timeout=timeout_s, source_address=(address, 0))
            connection.sendall(_HELLO.pack(word, rank))
            found[other] = connection
        while len(found) < size - 1:
            connection, _ = listening.accept()
            connection.settimeout(min(10.0, timeout_s))
            try:
                said, other = _HELLO.unpack(_read(connection, _HELLO.size))
            except (OSError, struct.error):
                said, other = b"", -1
            if said == word and rank < other < size and other not in found:
                found[other] = connection
            else:  # a stranger
                connection.close()
    return found


def _read(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes, or fewer where the connection ends."""
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found

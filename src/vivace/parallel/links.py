"""Sockets between ranks: one for each pair, with frames that carry tensors, messages and the reason of a failure.

A frame is a header of sixteen bytes (kind, tag, length of the payload) and the payload. Small frames are written by the
caller; large ones by a thread of the link, so that a rank can compute, or receive, while it sends. Nagle's algorithm is
off: most frames are a kilobyte on which the other side waits.

Nothing is authenticated or encrypted. Whoever can connect can read and write, so links belong into a network that is
trusted; they stay on the loopback interface unless another one is named.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from vivace.errors import WorldError

HEADER = struct.Struct("<IIQ")
DATA, MESSAGE, FAILED = 1, 2, 3
"""Kinds of frames: numbers that the receiver expects, a message of any length, the reason why a rank gives up."""

INLINE_BYTES = 32 << 10
"""Frames of up to this many bytes are written by the caller: they fit into the buffers of a socket, so that two ranks
that write to each other at once do not wait for each other."""

BUFFER_BYTES = 1 << 20
MOST_PARTS = 512
"""Pieces of memory that are written or read in one call of the system, which takes twice as many."""
MOST_KEEPALIVE_S = 32767
"""Longest interval at which Linux probes a connection."""
CLOSE_S = 1.0
"""Most seconds for which a link that closes waits for its thread."""
LOOK_S = 0.5
"""How often a rank that waits for one link looks at the others."""


class Sent(NamedTuple):
    """What was sent for one purpose."""

    frames: int
    num_bytes: int


class Link:
    """One rank's end of a connection to another rank."""

    def __init__(self, rank: int, connection: socket.socket, timeout_s: float) -> None:
        """Take a connection over.

        Args:
            rank: who is at its other end.
            connection: a connected TCP socket.
            timeout_s: seconds after which a send that does not progress is given up.
        """
        self.rank = rank
        self.connection = connection
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        interval = min(MOST_KEEPALIVE_S, max(1, int(timeout_s / 4)))
        for keepalive in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, keepalive, interval)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        _set_timeout(connection, socket.SO_RCVTIMEO, min(LOOK_S, timeout_s))
        _set_timeout(connection, socket.SO_SNDTIMEO, timeout_s)
        self.reading = threading.Lock()
        """Held while a frame is read, from its header to its end."""
        self._changed = threading.Condition()
        self._unsent: deque[Sequence[memoryview]] = deque()
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send a frame; a large one is sent meanwhile, and its memory must not change before ``flush``.

        Raises:
            OSError: the connection is lost, now or with an earlier frame.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._is_writing and sum(map(len, parts)) <= INLINE_BYTES:
                self._write(parts)
                return
            self._unsent.append(parts)
            self._is_writing = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"vivace-link-{self.rank}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is handed to the system.

        Raises:
            OSError: the connection is lost.
        """
        with self._changed:
            while self._is_writing and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the connection and the thread."""
        with self._changed:
            self._error = self._error or OSError("the link is closed")
            self._changed.notify_all()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)  # it has parts of tensors, which must not be freed while Python ends

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._unsent and self._error is None:
                    self._is_writing = False
                    self._changed.notify_all()
                    self._changed.wait()
                if self._error is not None:
                    return
                parts = self._unsent.popleft()
            try:
                self._write(parts)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            del parts  # or the last frame's memory would be kept until the next

    def _write(self, parts: Sequence[memoryview]) -> None:
        left = list(parts)
        while left:
            count = self.connection.sendmsg(left[:MOST_PARTS])
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


class Links:
    """All links of one rank. Only one thread sends at a time, and one reads what a rank sends; any may look."""

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float, *, linger_s: float = 0.0
    ) -> None:
        """Take connections to all other ranks over.

        Args:
            rank: whose links they are.
            connections: by rank.
            timeout_s: seconds without an answer after which a rank is said to hang.
            linger_s: most seconds for which a rank that gives up waits until rank 0 has read why. What has started the
                ranks may end all of them as soon as one has ended.
        """
        self.rank = rank
        self.linger_s = linger_s
        self.timeout_s = timeout_s
        self.of = {other: Link(other, connections[other], timeout_s) for other in sorted(connections)}
        self.sent: Counter[tuple[int, str]] = Counter()
        """Bytes of payload that were sent, by receiver and purpose."""
        self.frames: Counter[tuple[int, str]] = Counter()
        """Number of frames, likewise; each has a header of sixteen bytes besides."""
        self.failure: WorldError | None = None
        """Why this world has ended; None while it is whole."""
        self.has_failed = False
        """Whether it ended because a rank is gone or has given up."""

    def send(self, rank: int, tag: int, *parts: Tensor | bytes, kind: int = DATA, purpose: str) -> None:
        """Send a frame to a rank; the memory of large tensors must not change before it is flushed.

        Raises:
            WorldError: the rank is gone.
        """
        self._check()
        views = [view_of(part) for part in parts]
        size = sum(map(len, views))
        self.sent[rank, purpose] += size
        self.frames[rank, purpose] += 1
        try:
            self.of[rank].send([memoryview(HEADER.pack(kind, tag, size)), *(view for view in views if len(view))])
        except OSError as error:
            self._lost(rank, error)

    def receive(self, rank: int, tag: int, *into: Tensor) -> None:
        """Wait for a rank's frame of this tag and put it into contiguous tensors, which it must fill.

        Raises:
            WorldError: a rank is gone, hangs or has given up, or sends something else.
        """
        self._check()
        header, views = bytearray(HEADER.size), [view_of(part) for part in into]
        expected = sum(map(len, views))
        with self.of[rank].reading:
            count = self._read(rank, [memoryview(header), *views])
            kind, found, size = HEADER.unpack(header)
            if kind == FAILED:
                self._told(rank, size, b"".join(views)[: count - HEADER.size])
        if (kind, found, size) != (DATA, tag, expected):
            self.fail(
                f"rank {rank} sent a frame ({kind}, {found}, {size} bytes) where rank {self.rank} waits for "
                f"({DATA}, {tag}, {expected} bytes); the ranks are out of step"
            )

    def message(self, rank: int, *, is_idle: bool = False) -> bytearray:
        """Wait for a rank's next message and return it.

        Args:
            rank: who sends it.
            is_idle: whether there may be none for as long as it likes; a connection that is lost still ends the wait.

        Raises:
            WorldError: a rank is gone, hangs or has given up, or sends something else.
        """
        self._check()
        header = bytearray(HEADER.size)
        with self.of[rank].reading:
            self._read(rank, [memoryview(header)], is_idle=is_idle)
            kind, _, size = HEADER.unpack(header)
            if kind == FAILED:
                self._told(rank, size, b"")
            if kind != MESSAGE or size > 1 << 40:
                self.fail(f"rank {rank} sent a frame of kind {kind} where rank {self.rank} waits for a message")
            payload = bytearray(size)
            if size:
                self._read(rank, [memoryview(payload)])
        return payload

    def look(self) -> None:
        """Look whether a rank is gone or has given up, without waiting for anything.

        Raises:
            WorldError: one is, or has.
        """
        self._check()
        self._look_around(None)

    def flush(self) -> None:
        """Wait until everything is handed to the system."""
        for rank, link in self.of.items():
            try:
                link.flush()
            except OSError as error:
                self._lost(rank, error)

    def fail(self, message: str) -> NoReturn:
        """Tell every rank why this world ends, and end it.

        Raises:
            WorldError: always.
        """
        if self.failure is None:
            self.failure, self.has_failed = WorldError(message), True
            self._tell(message)
            self._linger()
            self.close()
        raise self.failure

    def _linger(self) -> None:
        """Wait until rank 0 has ended its connection."""
        until = time.monotonic() + self.linger_s
        leader = self.of.get(0)
        while leader is not None and time.monotonic() < until:
            try:
                if not leader.connection.recv(1 << 16):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return

    def close(self) -> None:
        """Close the connections to all ranks."""
        for link in self.of.values():
            link.close()
        if self.failure is None:
            self.failure = WorldError("the ranks have ended; load the model again under torchrun")

    def traffic(self) -> dict[str, dict[str, Sent]]:
        """Return what was sent so far, by receiver and purpose."""
        found: dict[str, dict[str, Sent]] = {}
        for (rank, purpose), size in sorted(self.sent.items()):
            found.setdefault(str(rank), {})[purpose] = Sent(self.frames[rank, purpose], size)
        return found

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _read(self, rank: int, parts: Sequence[memoryview], *, is_idle: bool = False) -> int:
        """Fill these parts one after the other. A frame of failure may end earlier; return the number of bytes."""
        connection, left = self.of[rank].connection, list(parts)
        total, waited_from = 0, time.monotonic()
        while left:
            try:
                count = connection.recvmsg_into(left[:MOST_PARTS], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._look_around(rank)
                if time.monotonic() - waited_from > self.timeout_s and not is_idle:
                    self.fail(f"rank {rank} has not answered rank {self.rank} for {self.timeout_s:g} s")
                continue
            except OSError as error:
                self._lost(rank, error)
                break
            if count == 0:
                if total >= HEADER.size and HEADER.unpack_from(parts[0])[0] == FAILED:
                    return total
                self._lost(rank, None)
            total += count
            waited_from = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
            if left and len(parts) > 1 and total >= HEADER.size and HEADER.unpack_from(parts[0])[0] == FAILED:
                return total
        return total

    def _look_around(self, waiting_for: int | None) -> None:
        """Raise an error if a rank other than the one that is waited for is gone or has given up."""
        for rank in self.of:
            if rank == waiting_for:
                continue
            try:
                found = self._next(rank)
            except OSError as error:
                self._lost(rank, error)
            if found == b"":
                self._lost(rank, None)
            if found is not None and _is_reason(found):
                self.message(rank)

    def _next(self, rank: int) -> bytes | None:
        """Return how a rank's next frame begins, which stays to be read, and nothing where the connection has ended.

        None says that there is none yet, or that a frame is being read: what comes next may then be any numbers, and
        whoever reads it sees how it ends.
        """
        link = self.of[rank]
        if not link.reading.acquire(blocking=False):
            return None
        try:
            return link.connection.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        finally:
            link.reading.release()

    def _told(self, rank: int, size: int, begun: bytes) -> NoReturn:
        """Read the rest of the reason that a rank gives, and end with it."""
        rest = bytearray(max(0, min(size, 1 << 16) - len(begun)))
        with suppress(OSError):
            if rest:
                self.of[rank].connection.recv_into(rest, len(rest), socket.MSG_WAITALL)
        self.fail((begun + rest).decode(errors="replace") or f"rank {rank} gave up")

    def _lost(self, rank: int, error: OSError | None) -> NoReturn:
        """End with the rank whose connection is lost, unless another one has said why."""
        if self.failure is not None:
            raise self.failure
        for other in self.of:
            with suppress(OSError):
                found = self._next(other)
                if found is not None and _is_reason(found):
                    self.message(other)
        why = ""
        if error is not None and not isinstance(error, ConnectionResetError | BrokenPipeError):
            why = f" ({error.strerror or error})"
        self.fail(f"rank {rank} has ended{why}")

    def _tell(self, message: str) -> None:
        """Send the reason to whoever can still be reached."""
        payload = message.encode()
        for link in self.of.values():
            if not link._is_writing:
                with suppress(OSError):
                    _set_timeout(link.connection, socket.SO_SNDTIMEO, 1.0)
                    link.connection.sendall(HEADER.pack(FAILED, 0, len(payload)) + payload)


def _is_reason(begun: bytes) -> bool:
    """Return whether a frame that begins so says why a rank gives up."""
    return len(begun) == HEADER.size and HEADER.unpack(begun)[0] == FAILED


def view_of(part: Tensor | bytes) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    if isinstance(part, bytes):
        return memoryview(part)
    assert part.is_contiguous(), "what is sent or received lies in one piece"
    if part.numel() == 0:
        return memoryview(b"")
    bytes_of: Any = part.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(bytes_of)


def _set_timeout(connection: socket.socket, option: int, seconds: float) -> None:
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))

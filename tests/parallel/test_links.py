from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from vivace.errors import ConfigError, WorldError
from vivace.parallel.links import DATA, FAILED, INLINE_BYTES, MESSAGE, Links
from vivace.parallel.world import MOST_TIMEOUT_S, join


def linked(count: int, timeout_s: float = 5.0) -> list[Links]:
    """Links between so many ranks of this process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for high in range(count):
        for low in range(high):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                ends[high][low] = socket.create_connection(listening.getsockname())
                ends[low][high] = listening.accept()[0]
    return [Links(rank, ends[rank], timeout_s) for rank in range(count)]


@pytest.fixture
def pair() -> Iterator[list[Links]]:
    links = linked(2)
    yield links
    for each in links:
        each.close()


@pytest.mark.parametrize("count", [1, INLINE_BYTES // 4, 1 << 20])
def test_tensors_arrive_in_order_while_both_sides_send(pair: list[Links], count: int) -> None:
    sent = [[torch.randn(count) for _ in range(3)] for _ in range(2)]
    for number in range(3):
        for rank in (0, 1):
            pair[rank].send(1 - rank, number, sent[rank][number], purpose="o")
    for rank in (0, 1):
        for number in range(3):
            into = torch.empty(count)
            pair[rank].receive(1 - rank, number, into)
            assert torch.equal(into, sent[1 - rank][number])
    pair[0].flush()
    assert pair[0].traffic() == {"1": {"o": (3, 12 * count)}}


def test_a_link_that_closes_ends_its_thread(pair: list[Links]) -> None:
    """A thread that lets go of a tensor while Python ends would abort the process."""
    pair[0].send(1, 0, torch.zeros(1 << 20), purpose="o")
    pair[1].receive(0, 0, torch.empty(1 << 20))
    pair[0].flush()
    thread = pair[0].of[1]._thread
    assert thread is not None
    pair[0].close()
    assert not thread.is_alive()


def test_messages_of_any_length_wait_while_idle() -> None:
    first, second = linked(2, timeout_s=0.2)
    timer = threading.Timer(0.7, lambda: first.send(1, 0, b"end", kind=MESSAGE, purpose="messages"))
    timer.start()
    assert second.message(0, is_idle=True) == b"end"
    timer.join()
    first.close()
    second.close()


def test_a_timeout_may_be_longer_than_a_connection_is_probed() -> None:
    first, second = linked(2, timeout_s=MOST_TIMEOUT_S)
    first.send(1, 0, b"end", kind=MESSAGE, purpose="messages")
    assert second.message(0) == b"end"
    first.close()
    second.close()


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), MOST_TIMEOUT_S + 1, 0, -1])
def test_a_timeout_that_cannot_be_set_is_one_line(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout must be a number of seconds above 0 and at most 2147483, found"):
        join(timeout_s=timeout_s)


def test_frames_out_of_step_end_the_world(pair: list[Links]) -> None:
    pair[0].send(1, 7, torch.zeros(4), purpose="o")
    with pytest.raises(WorldError, match="out of step"):
        pair[1].receive(0, 8, torch.zeros(4))
    with pytest.raises(WorldError, match="out of step"):  # its reason has reached the other rank
        pair[0].receive(1, 9, torch.zeros(1000))


def test_the_rank_that_has_ended_is_named_by_those_that_wait_for_others() -> None:
    first, second, third = linked(3)
    second.close()
    with pytest.raises(WorldError, match="rank 1 has ended"):
        first.receive(2, 1, torch.zeros(4))
    with pytest.raises(WorldError, match="rank 1 has ended"):
        third.receive(0, 1, torch.zeros(4))


def test_a_rank_that_hangs_is_named() -> None:
    first, second = linked(2, timeout_s=0.3)
    with pytest.raises(WorldError, match=r"rank 1 has not answered rank 0 for 0\.3 s"):
        first.receive(1, 1, torch.zeros(4))
    second.close()


def test_a_reason_reaches_every_rank() -> None:
    first, second, third = linked(3)
    with pytest.raises(WorldError):
        third.fail("rank 2: there is no checkpoint directory nowhere")
    for links in (first, second):
        with pytest.raises(WorldError, match="rank 2: there is no checkpoint directory nowhere"):
            links.message(0 if links is second else 1)
    with pytest.raises(WorldError, match="nowhere"):
        first.send(1, 1, b"", purpose="o")


class Slow:
    """A connection that gives the header and eight bytes first, during which ``meanwhile`` runs in another thread."""

    def __init__(self, connection: socket.socket, meanwhile: Callable[[], object]) -> None:
        self._connection, self._meanwhile = connection, meanwhile
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def recvmsg_into(self, parts: Sequence[memoryview], *how: int) -> Any:
        if not self._is_first:
            return self._connection.recvmsg_into(parts, *how)
        self._is_first = False
        found = self._connection.recvmsg_into([parts[0], *(part[:8] for part in parts[1:])], *how)
        other = threading.Thread(target=self._meanwhile)
        other.start()
        other.join()
        return found


@pytest.mark.parametrize("kind", [DATA, MESSAGE])
def test_looking_does_not_take_numbers_for_a_reason(pair: list[Links], kind: int) -> None:
    """A server looks in another thread than the one that reads, and what comes next may then lie within a frame."""
    threes = torch.full((32,), FAILED, dtype=torch.int32)  # bytes that begin as a rank does that gives up
    pair[1].send(0, 1, threes, kind=kind, purpose="o")
    pair[0].of[1].connection = Slow(pair[0].of[1].connection, lambda: pair[0].look())  # type: ignore[assignment]
    if kind == DATA:
        into = torch.zeros_like(threes)
        pair[0].receive(1, 1, into)
    else:
        into = torch.frombuffer(pair[0].message(1), dtype=torch.int32)
    assert torch.equal(into, threes)
    with pytest.raises(WorldError):
        pair[1].fail("rank 1 can no longer")
    with pytest.raises(WorldError, match="can no longer"):
        pair[0].look()

"""The two health checks: whether the server has to be restarted, and whether it can be sent requests."""

from __future__ import annotations

from vivace.serve.api_error import APIError
from vivace.serve.worker import Worker


def check_live(worker: Worker, stall_timeout_s: float) -> None:
    """Return whether answers are still being made, however many wait.

    Args:
        worker: whose thread makes them.
        stall_timeout_s: how long a single step may take.

    Raises:
        Refusal: the thread has ended, or has been in one step for longer (503); only a new start helps.
    """
    if worker.has_died:
        raise APIError(503, "the worker has ended; the log says why", code="dead")
    busy_s = worker.heartbeat.busy_s
    if busy_s > stall_timeout_s:
        raise APIError(503, f"the worker has been in one step for {busy_s:.0f} seconds", code="stalled")


def check_ready(worker: Worker, stall_timeout_s: float) -> None:
    """Raise an error unless a request would be accepted now, given a place in the queue.

    Raises:
        APIError: the server has not begun, is stopping, or has to be restarted (503).
    """
    check_live(worker, stall_timeout_s)
    if not worker.is_healthy:
        raise APIError(503, "the server has not begun yet, or is stopping", code="stopping")

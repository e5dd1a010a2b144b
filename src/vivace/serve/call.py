"""One HTTP request while it is answered: its jobs, and the queue of their events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from vivace.decode.request import Emitted, Request
from vivace.serve.api_error import APIError
from vivace.serve.scoring import Scored
from vivace.serve.worker import Event, Failed, Job, Worker

STATES = ("received", "finished", "failed", "cancelled")


class Calls:
    """Passes events from the worker's thread to the calls that wait for them, once per step."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        """Number of jobs by state. When nothing runs, as many have ended as were received."""
        self._open: dict[Job, asyncio.Queue[tuple[Job, Event]]] = {}

    def dispatch(self, events: list[tuple[Job, Event]]) -> None:
        """Receive the events of a step; called on the worker's thread."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        for job, event in events:
            queue = self._open.get(job)
            if queue is not None:
                queue.put_nowait((job, event))

    def open(self, jobs: Sequence[Job], queue: asyncio.Queue[tuple[Job, Event]]) -> None:
        """Put the events of these jobs into this queue from now on."""
        self._open.update(dict.fromkeys(jobs, queue))

    def close(self, jobs: Sequence[Job]) -> None:
        """Stop delivering events of these jobs."""
        for job in jobs:
            self._open.pop(job, None)


class Call:
    """Runs the requests of one HTTP request; closing it cancels those that have not finished."""

    def __init__(
        self,
        worker: Worker,
        calls: Calls,
        requests: Sequence[Request],
        *,
        priority: int = 0,
        reports_progress: bool = False,
        group: int = 1,
        scores: int | None = None,
    ) -> None:
        """Prepare jobs.

        Args:
            worker: runs them.
            calls: brings their events.
            requests: one per job.
            priority: lower ones first.
            reports_progress: whether events of prompts being read are wanted.
            group: so many neighbours have the same prompt, which the first of them reads.
            scores: only score the prompts, and name so many of the likeliest tokens for each place.
        """
        self.jobs: list[Job] = []
        for index, request in enumerate(requests):
            leader = None if index % group == 0 or request.prefix is None else self.jobs[index - index % group]
            self.jobs.append(Job(request, priority, reports_progress, leader, scores))
        self._worker = worker
        self._calls = calls
        self._queue: asyncio.Queue[tuple[Job, Event]] = asyncio.Queue()
        self._left: set[Job] = set()

    def start(self) -> None:
        """Submit the jobs.

        Raises:
            UsageError: the worker does not take them.
        """
        self._calls.open(self.jobs, self._queue)
        try:
            self._worker.submit(self.jobs)
        except BaseException:
            self._calls.close(self.jobs)
            raise
        self._left.update(self.jobs)
        self._calls.states["received"] += len(self.jobs)

    def close(self) -> None:
        """Cancel what has not finished and drop its events."""
        self._calls.close(self.jobs)
        self._worker.cancel(self.jobs)
        self._calls.states["cancelled"] += len(self._left)
        self._left.clear()

    def _over(self, job: Job, state: str) -> None:
        self._left.discard(job)
        self._calls.states[state] += 1

    @property
    def queue_s(self) -> float:
        """Return the seconds for which the first job waited for a slot."""
        job = self.jobs[0]
        return max(job.started_at - job.submitted_at, 0.0)

    async def events(self, idle_s: float | None = None) -> AsyncIterator[tuple[int, Event] | None]:
        """Yield (index of the request, event) until every request has finished, and None after each ``idle_s`` without
        one.

        Raises:
            APIError: a request failed.
        """
        places = {job: index for index, job in enumerate(self.jobs)}
        while self._left:
            try:
                job, event = await asyncio.wait_for(self._queue.get(), idle_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Failed):
                self._over(job, "failed")
                error = event.api_error
                raise APIError(error.status, str(error), param=error.param, code=error.code)
            if isinstance(event, Scored) or (isinstance(event, Emitted) and event.finish_reason is not None):
                self._over(job, "finished")
            yield places[job], event

"""The thread that owns the session: requests join and leave between its steps, and nothing else uses the model.

There is no lock around decoding. Callers put jobs into a queue and set flags. The thread reads both before every step,
so a cancelled request leaves the batch one step later at most. A request that fails gets its error and leaves; it
affects neither running nor waiting requests. Prompts are scored in turns, one after every step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from vivace.core.model import Decoder
from vivace.decode.isolation import STOPS, request_error
from vivace.decode.memory import MemoryBudget
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Emitted, Request
from vivace.decode.session import Session
from vivace.errors import VivaceError, WorldError
from vivace.serve.api_error import APIError, api_error_of
from vivace.serve.heartbeat import Heartbeat
from vivace.serve.scoring import Scored, scoring
from vivace.storage.prompt_cache.cache import PromptCache
from vivace.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptProgress:
    """How many tokens of a prompt have been read."""

    total: int
    cached: int
    processed: int
    """Number of tokens stored, cached ones included."""
    elapsed_s: float


@dataclass(frozen=True)
class Failed:
    """The job ended without an answer."""

    api_error: APIError


Event = Emitted | PromptProgress | Scored | Failed
Mailbox = Callable[[list[tuple["Job", Event]]], None]
"""Called on the worker's thread with all events of a step, once per step."""


@dataclass(eq=False)
class Job:
    """One sequence to decode, or a prompt to score."""

    request: Request
    priority: int = 0
    reports_progress: bool = False
    leader: Job | None = None
    """A job with the same prompt that reads it first; its entries are then shared."""
    scores: int | None = None
    """If set, the job only scores its prompt and returns so many likeliest tokens for each position."""
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    number: int = -1
    """Its id in the session."""
    has_begun: bool = False
    """Whether its prompt is read, or it has ended."""
    is_cancelled: bool = False


class Worker:
    """Steps a session for as long as there is work."""

    def __init__(
        self,
        model: Decoder,
        mailbox: Mailbox,
        *,
        num_slots: int,
        capacity: int,
        max_queue: int,
        prefill_budget: int,
        memory: MemoryBudget | None = None,
        num_beams: int = 1,
    ) -> None:
        """Allocate the session's cache; nothing runs before ``start``.

        Args:
            model: the decoder.
            mailbox: where events go.
            num_slots: sequences decoded at once.
            capacity: prompt and answer of a sequence together.
            max_queue: jobs that may wait.
            prefill_budget: prompt tokens read between two decoding steps.
            memory: what blocks of keys and values are taken from; None has no limit.
            num_beams: beams for which a sequence has entries even where it is as long as it may be.
        """
        self.memory = MemoryBudget() if memory is None else memory
        self._make: Callable[[], Session] = partial(
            Session,
            model,
            num_slots=num_slots,
            capacity=capacity * num_beams,
            prefill_budget=prefill_budget,
            memory=self.memory,
        )
        self.session = self._make()
        self.capacity = capacity
        self.num_slots = num_slots
        self.max_queue = max_queue
        self.num_target_passes = 0
        self.num_preemptions = 0
        """Times a sequence lost its slot when memory ended."""
        self.waits_for_memory = False
        """A sequence waits that has a free slot and no memory."""
        self.num_failed = 0
        """Number of sequences that ended with an error of their own."""
        self.heartbeat = Heartbeat()
        """Shows for how long the thread has been in one step."""
        self.prefix: PrefixCache | None = None
        """The prefix cache; its counters are read by the metrics, and requests contain handles to it."""
        self.on_disk: PromptCache | None = None
        """The prompt cache on disk, likewise."""
        self._mailbox = mailbox
        self._waiting: list[Job] = []
        self._running: dict[int, Job] = {}
        self._scoring: tuple[Job, Iterator[Scored | None]] | None = None
        """The prompt that is being scored, and its remaining turns."""
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="vivace-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Return whether the thread runs and takes jobs."""
        return self._thread.is_alive() and not self._is_closing

    @property
    def has_died(self) -> bool:
        """Return whether the thread was started and has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Return the number of sequences in a slot, plus one while a prompt is being scored."""
        return len(self._running) + (self._scoring is not None)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """Queue all of these jobs or none.

        Raises:
            APIError: the queue is full (429), or the server is stopping (503).
            CapacityError: no free slot could ever take one of them.
        """
        for job in jobs:
            job.request.check_fits(self.capacity)
            if job.scores is None:
                self.session.check(job.request)
        with self._changed:
            if self._is_closing or self.has_died:
                raise APIError(503, "the server is stopping and takes no more requests", code="stopping")
            if len(jobs) > self.num_slots + self.max_queue:
                raise APIError(
                    400,
                    f"this request asks for {len(jobs)} sequences and this server runs {self.num_slots} and keeps "
                    f"{self.max_queue} waiting; ask for fewer prompts or a smaller n",
                )
            room = self.num_slots + self.max_queue - self.num_waiting - self.num_running
            if len(jobs) > room:
                raise APIError(
                    429,
                    f"this request asks for {len(jobs)} sequences and there is room for {max(room, 0)}: "
                    f"{self.num_running} run and {self.num_waiting} wait; try again later",
                    code="queue_full",
                )
            self._check_wait(jobs)
            self._waiting += jobs
            self._changed.notify()

    def _check_wait(self, jobs: list[Job]) -> None:
        """Raise an error for jobs with which more would wait for memory than may wait."""
        free, num_late = self.memory.free_bytes, 0
        if free is None:
            return
        free += self.memory.evictable_bytes
        for job in (*self._waiting, *jobs):
            if job.scores is None:
                free -= self.session.room.first_bytes(job.request)
                num_late += free < 0
        if num_late > self.max_queue:
            raise APIError(
                429,
                f"{num_late} sequences would wait for memory and {self.max_queue} may: running ones have "
                f"{format_bytes(self.memory.taken_bytes)} of keys and values; try again later",
                code="memory_exceeded",
            )

    def cancel(self, jobs: list[Job]) -> None:
        """Stop jobs before the next step; jobs that have ended are ignored."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self._waiting = [job for job in self._waiting if not job.is_cancelled]
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the current step; what still runs ends with an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    events = self._step()
                except STOPS:
                    raise
                except BaseException as error:  # noqa: BLE001 - those in the session are told, those that wait go on
                    events = [self._failed(job, error) for job in self._take_running()]
                    self._mailbox(events)
                    self.session.close()
                    self.session = self._make()
                else:
                    if events:
                        self._mailbox(events)
                self._score()
        except WorldError as error:
            log.error("the model has ended: %s", error)
        finally:
            stopping = APIError(503, "the server was stopped before this answer was complete", code="stopping")
            with self._changed:
                self._is_closing = True
                waiting, self._waiting = self._waiting, []
            scored = [self._scoring[0]] if self._scoring else []
            self._mailbox([(job, Failed(stopping)) for job in (*self._take_running(), *scored, *waiting)])

    def _wait_for_work(self) -> bool:
        """Take the jobs and flags that callers left; return False when it is time to end."""
        with self._changed:
            while not (self._is_closing or self._waiting or self._running or self._scoring):
                self.heartbeat.rest()
                self._changed.wait()
            self.heartbeat.beat()
            for job in [job for job in self._running.values() if job.is_cancelled]:
                self.session.cancel(job.number)
                self._end(job)
            if self._scoring and self._scoring[0].is_cancelled:
                self._scoring = None
            self._admit()
        return not self._is_closing

    def _admit(self) -> None:
        """Move jobs into free slots: lower priority numbers first, then in order of arrival.

        No job overtakes one that waits for memory, so that it is not kept out by smaller ones.
        """
        is_full = False
        self.waits_for_memory = self.session.num_free > 0 and self.session.num_waiting > 0
        for job in sorted(self._waiting, key=lambda job: job.priority):
            if job.scores is not None:
                self._begin_scoring(job, job.scores)
                continue
            if is_full:
                continue
            if job.leader is not None and not job.leader.has_begun and not job.leader.is_cancelled:
                continue
            if self._running and not self.session.can_begin(job.request):
                is_full = True
                self.waits_for_memory = self.session.num_free > 0
                continue
            self._waiting.remove(job)
            job.started_at = time.perf_counter()
            try:
                job.number = self.session.admit(job.request)
            except VivaceError as error:
                job.has_begun = True
                self._mailbox([self._failed(job, error)])
            else:
                self._running[job.number] = job

    def _begin_scoring(self, job: Job, num_top: int) -> None:
        """Begin to score a prompt once what it wears can be had; one at a time, since each holds its rows in memory."""
        adapter = job.request.adapter
        if self._scoring is None and (adapter is None or adapter.is_ready()):
            self._waiting.remove(job)
            job.started_at = time.perf_counter()
            turns = scoring(
                *(self.session.model, job.request.tokens, num_top),
                chunk=self.session.chunk,
                adapter=adapter,
            )
            self._scoring = job, turns

    def _score(self) -> None:
        """Do one turn of the prompt that is being scored; a failure there affects no sequence."""
        if self._scoring is None:
            return
        job, turns = self._scoring
        self.heartbeat.beat()
        try:
            scored = next(turns)
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - told to whoever asked for it
            self._scoring = None
            self._mailbox([self._failed(job, error, "scoring its prompt")])
            return
        if scored is not None:
            self._scoring = None
            self._mailbox([(job, scored)])

    def _step(self) -> list[tuple[Job, Event]]:
        if not self._running:
            return []
        before, lost = self.session.num_target_passes, self.session.num_preemptions
        emitted = self.session.step()
        self.num_target_passes += self.session.num_target_passes - before
        self.num_preemptions += self.session.num_preemptions - lost
        events = self._progress()
        for one in emitted:
            job = self._running[one.request_id]
            job.has_begun = True
            if one.finish_reason is not None:
                self._end(job)
            if one.error is None:
                events.append((job, one))
            else:
                events.append(self._failed(job, one.error))
        return events

    def _progress(self) -> list[tuple[Job, Event]]:
        """Return progress events of jobs that asked for them and whose prompt was not read when the step began."""
        events: list[tuple[Job, Event]] = []
        for number, (cached, left) in self.session.reading.items():
            job = self._running[number]
            if job.reports_progress and not job.has_begun:
                total = len(job.request.tokens)
                read = total - left - 1 if left else total
                events.append((job, PromptProgress(total, cached, read, time.perf_counter() - job.started_at)))
        return events

    def _end(self, job: Job) -> None:
        job.has_begun = True
        self._running.pop(job.number, None)

    def _take_running(self) -> list[Job]:
        """Return all jobs that are in a slot, and forget them."""
        jobs = list(self._running.values())
        for job in jobs:
            self._end(job)
        return jobs

    def _failed(self, job: Job, error: BaseException, part: str = "a step of the whole session") -> tuple[Job, Event]:
        """Return the event of a job that failed; the log has the details where the job is not at fault."""
        api_error = api_error_of(request_error(error, part))
        self.num_failed += 1
        log.log(
            logging.ERROR if api_error.status >= 500 else logging.INFO, "a request failed: %s", error, exc_info=error
        )
        return job, Failed(api_error)

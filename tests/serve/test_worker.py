"""The thread that steps the session, without HTTP."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.decode.failing import CALLS, Failing, Plan, explode, outcomes
from vivace.decode.memory import MemoryBudget, text_bytes
from vivace.decode.request import Emitted, Request
from vivace.engine import Engine, Options
from vivace.errors import CapacityError
from vivace.serve.api_error import APIError
from vivace.serve.scoring import Scored
from vivace.serve.worker import Event, Failed, Job, PromptProgress, Worker

Mail = queue.Queue[list[tuple[Job, Event]]]


@pytest.fixture
def mail() -> Mail:
    return queue.Queue()


@pytest.fixture
def worker(engine: Engine, mail: Mail) -> Iterator[Worker]:
    made = Worker(engine.model, mail.put, num_slots=2, capacity=600, max_queue=1, prefill_budget=256)
    yield made
    made.close()


def request(engine: Engine, num_tokens: int, prompt: str = "abc") -> Request:
    return engine.request(prompt, Options(max_new_tokens=num_tokens, ignore_eos=True, method="plain", raw=True))


def until_done(mail: Mail, *jobs: Job) -> list[tuple[Job, Event]]:
    events: list[tuple[Job, Event]] = []
    left = set(jobs)
    while left:
        for job, event in mail.get(timeout=30):
            events.append((job, event))
            if isinstance(event, Failed | Scored) or (isinstance(event, Emitted) and event.finish_reason):
                left.discard(job)
    return events


def test_a_cancelled_job_leaves_before_the_next_step(engine: Engine, worker: Worker, mail: Mail) -> None:
    long, short = Job(request(engine, 500)), Job(request(engine, 20))
    worker.submit([long, short])
    worker.start()
    mail.get(timeout=30)
    worker.cancel([long])
    steps = 0
    for job, _ in until_done(mail, short):
        steps += job is long
    assert steps <= 25, "the other one went on alone"
    assert worker.num_running == 0
    assert worker.session.is_idle


def test_a_waiting_job_that_is_cancelled_never_runs(engine: Engine, worker: Worker, mail: Mail) -> None:
    jobs = [Job(request(engine, 30)) for _ in range(3)]
    worker.submit(jobs)
    with pytest.raises(APIError, match="room for 0: 0 run and 3 wait") as caught:
        worker.submit([Job(request(engine, 3))])
    assert caught.value.status == 429
    worker.cancel([jobs[2]])
    assert worker.num_waiting == 2, "its place in the queue is free at once"
    worker.start()
    events = until_done(mail, *jobs[:2])
    assert jobs[2] not in {job for job, _ in events}


def test_a_job_that_fits_no_slot_is_refused(engine: Engine, worker: Worker) -> None:
    with pytest.raises(CapacityError, match="the context holds 600"):
        worker.submit([Job(request(engine, 700))])
    assert worker.num_waiting == 0


def test_a_long_prompt_does_not_hold_up_a_running_answer(engine: Engine, worker: Worker, mail: Mail) -> None:
    runs = Job(request(engine, 40))
    worker.submit([runs])
    worker.start()
    mail.get(timeout=30)
    reads = Job(request(engine, 2, "x y z " * 85), reports_progress=True)
    assert len(reads.request.tokens) > 2 * worker.session.chunk - 10
    worker.submit([reads])
    events = until_done(mail, runs, reads)
    progress = [event for _, event in events if isinstance(event, PromptProgress)]
    assert [event.processed for event in progress] == [256, len(reads.request.tokens)]
    first = next(place for place, (_, event) in enumerate(events) if isinstance(event, PromptProgress))
    last = next(place for place, (job, _) in enumerate(events) if job is reads and place > first + 1)
    assert any(job is runs for job, _ in events[first : last + 1]), "tokens came between two chunks"


def answers(events: list[tuple[Job, Event]], *jobs: Job) -> list[list[int]]:
    """Tokens of each job, none of which failed."""
    found: dict[Job, list[int]] = {job: [] for job in jobs}
    for job, event in events:
        if job in found:
            assert not isinstance(event, Failed)
            found[job] += event.tokens if isinstance(event, Emitted) else ()
    return [found[job] for job in jobs]


def offline(engine: Engine, *jobs: Job) -> list[list[int]]:
    return [
        one.tokens
        for one in outcomes(engine.session([job.request for job in jobs], Options()), [job.request for job in jobs])
    ]


def refusals(events: list[tuple[Job, Event]]) -> dict[Job, APIError]:
    return {job: event.api_error for job, event in events if isinstance(event, Failed)}


def test_a_request_that_fails_is_told_so_alone(
    engine: Engine, worker: Worker, mail: Mail, caplog: pytest.LogCaptureFixture
) -> None:
    """Those beside it and those that wait get what they would have got."""
    bad = Job(replace(request(engine, 5), processors=(explode,)))
    beside, waiting = Job(request(engine, 50)), Job(request(engine, 9, "xyz"))
    worker.submit([bad, beside, waiting])
    worker.start()
    events = until_done(mail, bad, beside, waiting)
    ((job, api_error),) = refusals(events).items()
    assert (job, api_error.status, api_error.code) == (bad, 500, "decoding_failed")
    assert "a bug of its own" not in str(api_error), "what it was stands in the log"
    assert "a bug of its own" in caplog.text
    assert answers(events, beside, waiting) == offline(engine, beside, waiting)
    assert (worker.num_failed, worker.num_running, worker.is_healthy) == (1, 0, True)


@pytest.mark.parametrize("call", [*CALLS, "open", "release"])
def test_a_failing_drafter_ends_its_own_requests(engine: Engine, worker: Worker, mail: Mail, call: str) -> None:
    good = request(engine, 20)
    bad = Job(replace(good, drafter=Failing(good.drafter, Plan(call, stays=True, error=MemoryError()))))
    beside, waiting = Job(good), Job(good)
    worker.submit([bad, beside, waiting])
    worker.start()
    events = until_done(mail, bad, beside, waiting)
    assert answers(events, beside, waiting) == offline(engine, beside, waiting)
    if call == "release":
        assert refusals(events) == {}, "its text was complete"
    else:
        assert refusals(events)[bad].code == "decoding_failed"


def test_what_a_request_excludes_is_its_own_mistake(engine: Engine, worker: Worker, mail: Mail) -> None:
    bad = Job(replace(request(engine, 5), processors=(lambda ids, scores: scores - torch.inf,)))
    beside = Job(request(engine, 20))
    worker.submit([bad, beside])
    worker.start()
    events = until_done(mail, bad, beside)
    api_error = refusals(events)[bad]
    assert (api_error.status, api_error.code) == (400, "no_token_allowed")
    assert "after 0 new ones" in str(api_error)
    assert answers(events, beside) == offline(engine, beside)


def test_those_that_wait_outlive_a_session_that_breaks(
    engine: Engine, worker: Worker, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours, outside of any request: who ran is told so, who waited is answered."""
    running, waiting = [Job(request(engine, 50)), Job(request(engine, 50))], Job(request(engine, 9))
    worker.submit([*running, waiting])

    def fail() -> list[Emitted]:
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(worker.session, "step", fail)
    worker.start()
    events = until_done(mail, *running, waiting)
    assert set(refusals(events)) == set(running)
    assert {one.code for one in refusals(events).values()} == {"decoding_failed"}
    assert answers(events, waiting) == offline(engine, waiting)
    assert worker.num_failed == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_tells_everybody(
    engine: Engine, worker: Worker, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Emitted]:
        raise SystemExit

    monkeypatch.setattr(worker.session, "step", fail)
    jobs = [Job(request(engine, 5)) for _ in range(3)]
    worker.submit(jobs)
    worker.start()
    assert {one.status for one in refusals(until_done(mail, *jobs)).values()} == {503}
    assert not worker.is_healthy
    with pytest.raises(APIError, match="stopping"):
        worker.submit([Job(request(engine, 1))])


def test_a_job_that_the_session_does_not_take_is_told_so(
    engine: Engine, worker: Worker, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, bad = worker.session.admit, Job(request(engine, 5))

    def picky(asked: Request) -> int:
        if asked is bad.request:
            raise CapacityError("no room for this one")
        return admit(asked)

    monkeypatch.setattr(worker.session, "admit", picky)
    beside = Job(request(engine, 9))
    worker.submit([bad, beside])
    worker.start()
    events = until_done(mail, bad, beside)
    assert "no room" in str(refusals(events)[bad])
    assert answers(events, beside) == offline(engine, beside)


def test_what_can_never_fit_is_not_told_to_come_back(engine: Engine, worker: Worker) -> None:
    with pytest.raises(APIError, match="asks for 4 sequences") as caught:
        worker.submit([Job(request(engine, 3)) for _ in range(4)])
    assert caught.value.status == 400


def test_jobs_wait_for_memory_and_give_it_back(engine: Engine, mail: Mail) -> None:
    """One that is cancelled, one that fails and one that ends; nobody runs beside them."""
    asked = request(engine, 60)
    asked = replace(asked, tokens=(asked.tokens * 200)[:200])
    budget = MemoryBudget(int(1.5 * text_bytes(engine.model, asked.drafter, 260)))
    worker = Worker(engine.model, mail.put, num_slots=3, capacity=600, max_queue=3, prefill_budget=256, memory=budget)
    jobs = [Job(asked), Job(replace(asked, processors=(explode,))), Job(asked), Job(request(engine, 5))]
    worker.submit(jobs[:3])
    with pytest.raises(APIError, match="4 sequences would wait for memory and 3 may") as caught:
        worker.submit([Job(asked), Job(asked)])
    assert (caught.value.status, caught.value.code) == (429, "memory_exceeded")
    worker.submit(jobs[3:])
    worker.start()
    assert {job for job, _ in mail.get(timeout=30)} == {jobs[0]}
    worker.cancel(jobs[:1])
    events = until_done(mail, *jobs[1:])
    assert set(refusals(events)) == {jobs[1]}
    assert answers(events, jobs[2], jobs[3]) == offline(engine, jobs[2], jobs[3])
    assert budget.taken_bytes == 0
    worker.close()


def test_a_session_that_breaks_gives_its_memory_back(
    engine: Engine, worker: Worker, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, job = worker.session.step, Job(request(engine, 50))

    def fail() -> list[Emitted]:
        step()
        assert worker.memory.taken_bytes > 0
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(worker.session, "step", fail)
    worker.submit([job])
    worker.start()
    until_done(mail, job)
    worker.close()
    assert worker.memory.taken_bytes == 0


def test_closing_tells_those_who_wait(engine: Engine, worker: Worker, mail: Mail) -> None:
    jobs = [Job(request(engine, 500)) for _ in range(3)]
    worker.submit(jobs)
    worker.start()
    mail.get(timeout=30)
    worker.close()
    failed = [job for job, event in until_done(mail, *jobs) if isinstance(event, Failed)]
    assert set(failed) == set(jobs)
    with pytest.raises(APIError, match="stopping"):
        worker.submit([Job(request(engine, 1))])

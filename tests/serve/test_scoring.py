"""Prompts that are scored: the numbers of one whole pass, in turns between which others are decoded."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import vivace
from tests.serve.test_worker import Mail, answers, offline, refusals, request, until_done
from vivace.decode.request import Emitted
from vivace.engine import SHIPPED, Engine
from vivace.serve import scoring as module
from vivace.serve.api_error import APIError
from vivace.serve.scoring import Scored, scoring
from vivace.serve.worker import Event, Job, Worker

LONG = tuple(5 + place * 7 % 300 for place in range(512))


def whole(engine: Engine, tokens: tuple[int, ...], num_top: int) -> Scored:
    """The scores from the logits of one pass over the text."""
    logprobs = torch.log_softmax(engine.logits([list(tokens)])[0, :-1], -1)
    own = logprobs.gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]
    tops = logprobs.topk(num_top)
    return Scored(own.tolist(), tops.indices.tolist(), tops.values.tolist())


def scored(engine: Engine, tokens: tuple[int, ...], num_top: int, chunk: int) -> tuple[int, Scored]:
    """How many turns it took, and the scores."""
    *waits, found = scoring(engine.model, tokens, num_top, chunk=chunk)
    assert found is not None
    assert set(waits) <= {None}
    return len(waits) + 1, found


@pytest.mark.parametrize("count", [1, 2, 17, 256, 257, 511])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_are_those_of_one_pass(engine: Engine, dtype: str, count: int) -> None:
    """bfloat16 runs on native kernels where there are some."""
    opened = vivace.load(engine.folder, dtype=dtype)
    for num_top in (0, 5):
        for chunk in (3, 64, 256):
            assert scored(opened, LONG[:count], num_top, chunk)[1] == whole(opened, LONG[:count], num_top)


def test_the_model_that_ships_gives_the_same_bits() -> None:
    opened = vivace.load(SHIPPED)
    num_turns, found = scored(opened, LONG, 3, 256)
    assert found == whole(opened, LONG, 3)
    assert num_turns == 2 + 2, "24 layers by 512 rows are two chunks' worth, and the top is read in two"


def test_a_turn_costs_what_a_chunk_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: half of them for a text of two chunks, and at the top a chunk's rows or what memory allows."""
    assert engine.model.config.num_layers == 2
    assert [scored(engine, LONG[:count], 0, 128)[0] for count in (2, 128, 129, 256, 512)] == [2, 2, 3, 4, 6]
    monkeypatch.setattr(module, "MAX_BYTES", 4 * 64 * engine.model.config.vocab_size)
    assert scored(engine, LONG, 2, 256) == (10, whole(engine, LONG, 2))


@pytest.fixture
def mail() -> Mail:
    return queue.Queue()


@pytest.fixture
def worker(engine: Engine, mail: Mail) -> Iterator[Worker]:
    made = Worker(engine.model, mail.put, num_slots=2, capacity=600, max_queue=1, prefill_budget=64)
    made.session.chunk = 64
    yield made
    made.close()


def text(engine: Engine, tokens: tuple[int, ...] = LONG, **fields: Any) -> Job:
    return Job(replace(request(engine, 1), tokens=tokens), scores=2, **fields)


def test_a_stream_goes_on_between_the_turns(engine: Engine, worker: Worker, mail: Mail) -> None:
    """Ten turns, of two layers and eight parts of the top, and a step of the answer beside each."""
    runs, scores = Job(request(engine, 60)), text(engine)
    worker.submit([runs, scores])
    worker.start()
    events = until_done(mail, runs, scores)
    place = next(place for place, (job, _) in enumerate(events) if job is scores)
    assert events[place][1] == whole(engine, LONG, 2)
    num_turns = scored(engine, LONG, 2, 64)[0]
    assert num_turns == 10
    steps = sum(isinstance(event, Emitted) for _, event in events[:place])
    assert num_turns - 1 <= steps <= num_turns, "a step, a turn, a step, a turn"
    assert answers(events, runs) == offline(engine, runs)


def test_scoring_takes_no_slot_and_waits_for_none(engine: Engine, worker: Worker, mail: Mail) -> None:
    """Both slots are taken for longer than the text needs; a second text waits for the first."""
    running, texts = [Job(request(engine, 200)) for _ in range(2)], [text(engine), text(engine, LONG[:100])]
    worker.submit([*running, texts[0]])
    worker.start()
    first = until_done(mail, texts[0])
    assert worker.num_running >= 2
    worker.submit([texts[1]])
    events = first + until_done(mail, texts[1])
    assert not any(isinstance(event, Emitted) and event.finish_reason for _, event in events)
    assert [event for _, event in events if isinstance(event, Scored)] == [
        whole(engine, LONG, 2), whole(engine, LONG[:100], 2),
    ]  # fmt: skip


def test_a_text_that_is_cancelled_in_the_middle_is_given_up(engine: Engine, mail: Mail) -> None:
    """After the third step, so with the third of ten turns still to come or just made."""
    seen: list[tuple[Job, Event]] = []
    turns: list[int] = []

    def mailbox(events: list[tuple[Job, Event]]) -> None:
        seen.extend(events)
        if sum(isinstance(event, Emitted) for _, event in seen) == 3:
            worker.cancel([scores])
        mail.put(events)

    worker = Worker(engine.model, mailbox, num_slots=2, capacity=600, max_queue=1, prefill_budget=64)
    worker.session.chunk = 64
    runs, scores, later = Job(request(engine, 40)), text(engine), text(engine, LONG[:200])
    with pytest.MonkeyPatch.context() as patch:
        head = engine.model.head
        patch.setattr(engine.model, "head", lambda h, **fields: (turns.append(len(h)), head(h, **fields))[1])
        worker.submit([runs, scores, later])
        worker.start()
        events = until_done(mail, runs, later)
        worker.close()
    assert scores not in {job for job, _ in events}
    assert dict(events)[later] == whole(engine, LONG[:200], 2)
    assert answers(events, runs) == offline(engine, runs)
    assert sum(count == 64 for count in turns) <= 1 + 3, "of its eight parts one at most, and the three of the other"
    assert worker.num_running == 0


def test_scoring_that_fails_concerns_nobody_else(
    engine: Engine, worker: Worker, mail: Mail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object, **__: object) -> Iterator[Scored | None]:
        yield None
        raise MemoryError("no room for these logits")

    monkeypatch.setattr("vivace.serve.worker.scoring", explode)
    runs, scores = Job(request(engine, 20)), text(engine)
    worker.submit([runs, scores])
    worker.start()
    events = until_done(mail, runs, scores)
    assert answers(events, runs) == offline(engine, runs)
    assert {job: (one.status, one.code) for job, one in refusals(events).items()} == {scores: (500, "decoding_failed")}
    assert "no room for these logits" in caplog.text
    assert (worker.num_failed, worker.num_running, worker.is_healthy) == (1, 0, True)


def test_texts_to_score_wait_in_the_queue_like_others(engine: Engine, worker: Worker, mail: Mail) -> None:
    jobs = [text(engine, LONG[:20]), Job(request(engine, 3)), text(engine, LONG[:30])]
    worker.submit(jobs)
    with pytest.raises(APIError, match="room for 0: 0 run and 3 wait") as caught:
        worker.submit([text(engine)])
    assert caught.value.status == 429
    worker.cancel([jobs[0]])
    urgent = text(engine, LONG[:40], priority=-1)
    worker.submit([urgent])
    worker.start()
    events = until_done(mail, jobs[1], jobs[2], urgent)
    assert [job for job, event in events if isinstance(event, Scored)] == [urgent, jobs[2]]


def test_closing_tells_those_whose_text_is_not_scored(engine: Engine, worker: Worker, mail: Mail) -> None:
    def mailbox(events: list[tuple[Job, Event]]) -> None:
        mail.put(events)
        worker._is_closing = True  # as ``close`` does, which would wait for this very thread

    worker._mailbox = mailbox
    jobs = [Job(request(engine, 9)), text(engine), text(engine)]
    worker.submit(jobs)
    worker.start()
    assert {job: one.status for job, one in refusals(until_done(mail, *jobs)).items()} == dict.fromkeys(jobs, 503)

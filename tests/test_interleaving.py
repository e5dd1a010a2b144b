"""Sessions of one engine that run by turns answer, and guess, as each does when nothing else runs; for every method."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.every_method import NOT_QUICK, few_draw, load_for, make_model, not_quick_on_pytorch
from vivace.core.layers import Linear
from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.decode.request import Emitted
from vivace.decode.stats import DecodeStats
from vivace.engine import EXACT_ROWS, Engine, Options
from vivace.methods.table import METHODS
from vivace.serve.scoring import Scored
from vivace.serve.worker import Event, Job, Worker

PROMPTS = ("aka bob aka bob aka bob", "the quick fox the quick fox the")
OTHERS = ("fox", "bob aka the fox the quick", "aka")
NEW_TOKENS = 32
ON_PYTORCH = 24
"""New tokens where every step is made by PyTorch, which takes twenty times as long."""
COUNTED = (
    "num_spec_steps",
    "num_draft_tokens",
    "accepted_per_position",
    "drafted_per_position",
    "exit_layers",
    "num_layer_passes",
)
GUESSING = [name for name, method in METHODS.items() if method.lossless and name not in ("auto", "plain", "foresight")]

DTYPES = ("float32", "bfloat16")
Opened = Callable[[str], Engine]
Alone = Callable[..., "Answer"]


@dataclass
class Answer:
    """What can be seen of an answer, whoever else is answered."""

    tokens: list[int] = field(default_factory=list)
    guesses: list[tuple[int, ...]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    def count(self, stats: DecodeStats) -> None:
        """Take the counters; those of ``auto`` follow the clock."""
        self.counts = {} if stats.method == "auto" else {name: getattr(stats, name) for name in COUNTED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interleaving")


@pytest.fixture(params=DTYPES)
def opened(request: pytest.FixtureRequest, folder: Path) -> Opened:
    """A fresh engine for a method; bfloat16 runs on native kernels where there are some, three steps a call."""

    def get(method: str) -> Engine:
        engine = load_for(folder, method, dtype=request.param)
        engine.steps_per_call = 3
        return engine

    return get


@pytest.fixture(scope="module")
def known() -> dict[object, Answer]:
    """Answers that were given when nothing else ran."""
    return {}


@pytest.fixture
def alone(opened: Opened, known: dict[object, Answer], request: pytest.FixtureRequest) -> Alone:
    """A stream of an engine that does nothing else."""

    def get(prompt: str, **fields: Any) -> Answer:
        key = (request.node.callspec.params["opened"], prompt, *sorted(fields.items()))
        if key not in known:
            known[key] = to_its_end(stream(opened(fields["method"]), prompt, **fields))
        return known[key]

    return get


def options(engine: Engine, method: str, **fields: Any) -> dict[str, Any]:
    return {
        "method": method,
        "max_new_tokens": NEW_TOKENS if engine.model.dtype == torch.bfloat16 else ON_PYTORCH,
        "ignore_eos": True,
        "do_sample": False,
        "logprobs": False,
        **fields,
    }


def stream(engine: Engine, prompt: str, **fields: Any) -> Iterator[Answer]:
    """An answer as it grows, step by step, and once more when it is complete; guesses are shown where asked for."""
    shows, answer = fields.pop("shows_guesses", False), Answer()
    chosen = Options.of(options(engine, **fields))
    request = replace(engine.request(prompt, chosen), shows_guesses=shows)
    session = engine.session([request], chosen)
    session.admit(request)
    for emitted in session.drain():
        answer.tokens += emitted.tokens
        answer.guesses += emitted.guesses or ()
        answer.count(emitted.stats)
        yield answer


def to_its_end(running: Iterator[Answer]) -> Answer:
    *_, answer = running
    return answer


def by_turns(*running: Iterator[Answer]) -> list[Answer]:
    """Advance each by a step until all have ended."""
    answers: dict[int, Answer] = {}
    left = dict(enumerate(running))
    while left:
        for place, each in list(left.items()):
            found = next(each, None)
            if found is None:
                del left[place]
            else:
                answers[place] = found
    return [answers[place] for place in range(len(running))]


@not_quick_on_pytorch("opened")
@few_draw("kind", "sampled")
@pytest.mark.parametrize(
    ("opened", "kind"),
    [("bfloat16", "greedy"), *((dtype, kind) for dtype in DTYPES for kind in ("greedy, guesses shown", "sampled"))],
    indirect=["opened"],
)
@pytest.mark.parametrize("method", METHODS)
def test_two_streams_by_turns(opened: Opened, alone: Alone, method: str, kind: str) -> None:
    """Guesses are shown of steps made one by one; several in one native call, in bfloat16, only count them."""
    if method == "auto" and kind == "sampled":
        pytest.skip("whether auto draws its guesses follows the clock")
    fields: dict[str, Any] = {"method": method} if kind == "greedy" else {"method": method, "shows_guesses": True}
    if kind == "sampled":
        fields |= {"do_sample": True, "temperature": 0.7, "seed": 5}
    wanted = [alone(prompt, **fields) for prompt in PROMPTS]
    engine = opened(method)
    found = by_turns(*(stream(engine, prompt, **fields) for prompt in PROMPTS))
    if method == "auto":
        assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
        return
    assert found == wanted
    if method in GUESSING and kind != "sampled":
        assert sum(sum(answer.counts["accepted_per_position"]) for answer in wanted) > 0, "else there is little to see"


@not_quick_on_pytorch("opened")
@pytest.mark.parametrize("method", METHODS)
def test_a_stream_beside_a_whole_call(opened: Opened, alone: Alone, method: str) -> None:
    """The call ends, and gives its slots back, in the middle of the stream."""
    other, engine = opened(method), opened(method)
    called_alone = other.generate(OTHERS, **options(other, method))
    running = stream(engine, PROMPTS[0], method=method)
    for _ in range(3):
        next(running)
    called = engine.generate(OTHERS, **options(engine, method))
    assert to_its_end(running) == alone(PROMPTS[0], method=method)
    assert [result.token_ids for result in called] == [result.token_ids for result in called_alone]
    for result, expected in zip(called, called_alone, strict=True):
        mine, yours = Answer(), Answer()
        mine.count(result.stats)
        yours.count(expected.stats)
        assert mine == yours


@not_quick_on_pytorch("opened")
@pytest.mark.parametrize("method", METHODS)
def test_a_server_beside_other_calls(opened: Opened, alone: Alone, method: str) -> None:
    """Between two steps of a server's session the engine scores texts, and answers another one by the same method."""
    engine = opened(method)
    mail: queue.Queue[list[tuple[Job, Event]]] = queue.Queue()
    num_calls = 0

    def mailbox(events: list[tuple[Job, Event]]) -> None:
        """Called on the worker's thread between two steps."""
        nonlocal num_calls
        if num_calls < 4:
            num_calls += 1
            engine.logits([[9, 8, 7, 6, 5], [1, 2, 3, 4, 5]])
            engine.generate(OTHERS[1], **options(engine, method))
        mail.put(events)

    worker = Worker(engine.model, mailbox, num_slots=2, capacity=400, max_queue=8, prefill_budget=256)
    worker.session.steps_per_call = engine.steps_per_call
    job = Job(engine.request(PROMPTS[0], Options.of(options(engine, method))))
    worker.submit([job, *(Job(replace(job.request, tokens=(5, 6, 7) * count), scores=1) for count in (1, 20, 90))])
    worker.start()
    answer, is_done, num_scored = Answer(), False, 0
    try:
        while not is_done or num_scored < 3:
            for _, event in mail.get(timeout=60):
                assert isinstance(event, Emitted | Scored), event
                num_scored += isinstance(event, Scored)
                if isinstance(event, Emitted):
                    answer.tokens += event.tokens
                    answer.count(event.stats)
                    is_done = event.finish_reason is not None
    finally:
        worker.close()
    assert num_calls == 4
    assert answer == alone(PROMPTS[0], method=method)


@NOT_QUICK
@pytest.mark.parametrize("method", METHODS)
def test_an_exact_stream_stays_exact(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Every decoding call of the stream is padded, before and after a call of ``generate`` that is not."""
    engine = load_for(folder, method, kernels="torch")
    fields: dict[str, Any] = {"method": method, "exact": True, "max_new_tokens": 14}
    alone = to_its_end(stream(engine, PROMPTS[0], **fields))
    rows: list[int] = []
    forward, own = Layer.forward, set(engine.model.layers)

    def recorded(self: Layer, h: torch.Tensor, step: Step) -> torch.Tensor:
        if step.chunk is None and self in own:
            rows.append(len(h))
        return forward(self, h, step)

    monkeypatch.setattr(Layer, "forward", recorded)
    running = stream(engine, PROMPTS[0], **fields)
    next(running)
    assert rows
    assert {count % EXACT_ROWS for count in rows} == {0}
    rows.clear()
    engine.generate(OTHERS[0], **options(engine, method, max_new_tokens=14))
    assert any(count % EXACT_ROWS for count in rows), "the call beside it is not exact"
    rows.clear()
    found = to_its_end(running)
    assert found.tokens == alone.tokens
    assert rows
    assert {count % EXACT_ROWS for count in rows} == {0}


def test_heads_are_padded_with_their_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the logits of an exact session sees one number of rows; engine.logits sees its own."""
    engine = vivace.load(make_model(folder, "lookup"), kernels="torch")
    assert not isinstance(engine.model.lm_head, Linear), "the embedding is the head: look at the norm before it"
    rows: list[int] = []
    norm = type(engine.model).norm
    monkeypatch.setattr(type(engine.model), "norm", lambda self, h: (rows.append(len(h)), norm(self, h))[1])
    running = stream(engine, PROMPTS[0], method="lookup", exact=True)
    next(running)
    assert set(rows) == {EXACT_ROWS}
    rows.clear()
    engine.logits([[5, 6, 7]])
    assert rows == [3]
    rows.clear()
    to_its_end(running)
    assert set(rows) == {EXACT_ROWS}

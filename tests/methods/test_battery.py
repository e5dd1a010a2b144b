"""What every method of the table does, in each kind of draft that it may be tuned to.

A new line of the table is tested here by itself: the toy of ``tests/methods/bigram`` stands among the others. How
sessions share a method, how it goes on behind a cached prompt and behind a pass that failed, is in
``tests/test_interleaving.py``, ``tests/test_cached_prompts.py`` and ``tests/test_failing_passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import vivace
from tests.decode.failing import Outcome, outcomes
from tests.decode.runs import Result, finish
from tests.every_method import QUICK, keep_weights, make_model, make_weights, plans_of, skip_unless_it_runs
from tests.methods.bigram.spec import BIGRAM
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.engine import Engine
from vivace.methods.composition import stored_of
from vivace.methods.spec import Plan
from vivace.methods.table import METHODS

T = TypeVar("T")
PROMPTS = ("a", "aka bob aka bob aka bob", "the quick fox the quick fox the", "fox", "bob the aka fox aka the aka fox")
COUNT = 20
HOT = Sampling(do_sample=True, temperature=1.5)
EVERY = {**METHODS, BIGRAM.name: BIGRAM}
BY_THE_CLOCK = ("auto",)
"""What these draft depends on how long passes take."""


@dataclass(frozen=True)
class Case:
    """A method and a plan to draft by; None is the method's own."""

    method: str
    plan: Plan | None
    kind: str

    def __str__(self) -> str:
        return f"{self.method} {self.kind}".strip()


def cases() -> list[Case]:
    """Every method in every kind of draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, BIGRAM.name, BIGRAM)  # type: ignore[arg-type]
        return [Case(method, plan, kind) for method in EVERY for kind, plan in plans_of(method).items()]


CASES = cases()
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _in_the_table() -> Iterator[None]:
    """The toy too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, BIGRAM.name, BIGRAM)  # type: ignore[arg-type]
        yield


class Bench:
    """Models with all weights beside them, and what was made with them already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for method in EVERY:
            make_model(folder, method)
        self.engine = cache(self._engine)
        self.drafter = cache(self._drafter)
        self.alone = cache(self._alone)

    def _engine(self, base: Path, dtype: str) -> Engine:
        return vivace.load(base, dtype=dtype)

    def engine_of(self, method: str, dtype: str) -> Engine:
        """The model that a method runs on, on native kernels where there are some for this precision."""
        engine = self.engine(make_model(self.folder, method), dtype)
        skip_unless_it_runs(engine, method)
        return engine

    def _drafter(self, case: Case, dtype: str) -> Drafter:
        methods = copy(self.engine_of(case.method, dtype).methods)
        return (methods if case.plan is None else methods.planned(case.plan)).drafter(case.method)

    def requests(self, case: Case | None, of: str, dtype: str, **fields: Any) -> list[Request]:
        """Prompts decoded by a case or plainly, fewer and shorter on PyTorch; every second one asks for log p."""
        engine = self.engine_of(of, dtype)
        drafter = NoDrafts() if case is None else self.drafter(case, dtype)
        prompts, count = (PROMPTS, COUNT) if dtype == "bfloat16" else (PROMPTS[:3], COUNT // 2)
        asked = [tuple(engine.tokenizer.encode(prompt)) for prompt in prompts]
        return [Request(t, count, drafter, logprobs=place % 2 == 1, **fields) for place, t in enumerate(asked)]

    def _alone(self, case: Case | None, of: str, dtype: str) -> list[Result]:
        """What each prompt gets in a session of its own."""
        return [finish(self.session(of, dtype, 1), [request])[0] for request in self.requests(case, of, dtype)]

    def session(self, method: str, dtype: str, slots: int) -> Session:
        """One whose native calls make three steps, whatever the clock says."""
        model = self.engine_of(method, dtype).model
        return Session(model, num_slots=slots, capacity=96, chunk=8, steps_per_call=3)

    def expected(self, case: Case, dtype: str) -> list[Result]:
        """The answers of plain decoding, or of a method that has its own."""
        of = "foresight" if case.method == "foresight" else "plain"
        return self.alone(None, of, dtype) if METHODS[case.method].lossless else self.alone(case, case.method, dtype)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("battery"))


@pytest.mark.slow_where(lambda case, dtype: dtype == "float32" and case.method not in (*QUICK, "foresight"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_case
def test_a_ragged_batch_has_the_text_of_plain_decoding(bench: Bench, case: Case, dtype: str) -> None:
    """Token for token and log p to the bit, while requests join and leave; those that lose something say it alone."""
    found = finish(bench.session(case.method, dtype, 3), bench.requests(case, case.method, dtype), every=2)
    expected = bench.expected(case, dtype)
    assert [(r.tokens, r.logprobs, r.reason) for r in found] == [(r.tokens, r.logprobs, r.reason) for r in expected]
    assert {result.stats.method for result in found} == {case.method}
    drafted = sum(result.stats.num_draft_tokens for result in found)
    assert (drafted > 0) == drafts(case.method)


def drafts(method: str) -> bool:
    """Whether it guesses; what ``auto`` does follows the clock, but it tries everything once."""
    spec = METHODS[method]
    return spec.lossless and method not in ("plain", "foresight")


@each_case
def test_an_end_inside_a_draft_cuts_the_text(bench: Bench, case: Case) -> None:
    """At every place: the token itself, and what it spells."""
    engine, dtype = bench.engine_of(case.method, "bfloat16"), "bfloat16"
    request, text = bench.requests(case, case.method, dtype)[1], bench.expected(case, dtype)[1].tokens
    stops, ends = list[StopRule](), list[int]()
    for place in range(10):
        stops.append(StopRule(end_tokens=frozenset([text[place]])))
        ends.append(text.index(text[place]))
        written = spelt(text[: place + 1])[-2:]
        stops.append(StopRule(stop_strings=(written,), detokenize=spelt))
        ends.append(next(n for n in range(COUNT) if written in spelt(text[: n + 1])))
    session = bench.session(case.method, dtype, 4)
    found = finish(session, [replace(request, stop=stop, logprobs=False) for stop in stops])
    for result, end in zip(found, ends, strict=True):
        assert (result.tokens, result.reason) == (text[: end + 1], "stop")
    assert session.cache.lengths == [0] * 4
    assert engine.model is session.model


def spelt(tokens: Sequence[int]) -> str:
    """Every token as three letters, so that a stop string may end inside one."""
    return "".join(chr(97 + token % 26) + chr(97 + token // 26) + "." for token in tokens)


@pytest.mark.parametrize("case", [case for case in CASES if case.method not in BY_THE_CLOCK], ids=str)
def test_a_seed_gives_a_text(bench: Bench, case: Case) -> None:
    """The same alone and among others, and another seed another."""
    first, second, third, *_ = bench.requests(case, case.method, "bfloat16", sampling=HOT)
    asked = [replace(first, seed=1), replace(second, seed=1), replace(first, seed=2), replace(third, seed=3)]
    together = finish(bench.session(case.method, "bfloat16", 3), [*asked, asked[0]])
    alone = [finish(bench.session(case.method, "bfloat16", 1), [request])[0] for request in asked]
    assert [r.tokens for r in together] == [r.tokens for r in (*alone, alone[0])]
    assert alone[0].tokens != alone[2].tokens


@each_case
def test_who_was_cancelled_leaves_nothing_behind(bench: Bench, case: Case) -> None:
    """Neither in a text nor in guesses, whether it was reading its prompt, decoding or waiting."""
    asked = [replace(r, shows_guesses=True, logprobs=False) for r in bench.requests(case, case.method, "bfloat16")]
    fresh = outcomes(bench.session(case.method, "bfloat16", 2), asked[2:4])
    session = bench.session(case.method, "bfloat16", 2)
    for steps in (1, 5):
        begun = [session.admit(asked[place]) for place in (1, 4, 0)]
        for _ in range(steps):
            session.step()
        for each in begun:
            session.cancel(each)
        assert session.is_idle
    assert [seen(case, one) for one in outcomes(session, asked[2:4])] == [seen(case, one) for one in fresh]


def seen(case: Case, outcome: Outcome) -> tuple[object, ...]:
    guesses = () if case.method in BY_THE_CLOCK else tuple(outcome.guesses)
    return (*outcome.tokens, outcome.reason, guesses)


@dataclass
class InMemory:
    """Fills what a drafter is made from with weights that were never stored."""

    model: Decoder
    weights: Any
    plan: Any
    length: int | None = None
    quality: float | None = None
    kind: str = "unstored"

    def vocabulary(self, size: int) -> None:
        assert size == 0

    def trained(self) -> tuple[Any, Any]:
        return self.weights, self.plan

    def shared(self, key: str, make: Callable[[], T]) -> T:
        return make()


STORED = [name for name, method in EVERY.items() if method.adapter == name]


@pytest.mark.parametrize("method", STORED)
def test_what_was_saved_is_loaded(bench: Bench, method: str, tmp_path: Path) -> None:
    """It drafts, or leaves early, as it did before it was written."""
    base = make_model(bench.folder, method)
    engine = vivace.load(base, dtype="float32")
    weights, plan = make_weights(method, engine.model)
    keep_weights(tmp_path / method, method, base, weights, plan)
    loaded = vivace.load(base, dtype="float32", adapters=tmp_path / method)
    assert loaded.methods.adapter_folder(method) == tmp_path / method
    kept = {name: value.clone() for name, value in weights.tensors().items()}
    read = loaded.methods.trained(method)[0].tensors()
    assert kept.keys() == read.keys()
    assert all(torch.equal(value, read[name]) for name, value in kept.items())
    made = METHODS[method].make(InMemory(engine.model, weights, plan))  # type: ignore[arg-type]
    answers = []
    for drafter, model in ((made, engine.model), (loaded.methods.drafter(method), loaded.model)):
        asked = [tuple(engine.tokenizer.encode(prompt)) for prompt in PROMPTS[1:3]]
        session = Session(model, num_slots=2, capacity=96, chunk=8)
        answers.append(outcomes(session, [Request(t, COUNT // 2, drafter, shows_guesses=True) for t in asked]))
    assert answers[0] == answers[1]
    assert stored_of(method).weights is not None

"""Every method: a pass that fails is made again as if it had not, and an engine outlives what fails in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vivace
from tests.decode.failing import Failing, Outcome, Plan, bars_from, outcomes
from tests.every_method import load_for, not_quick_on_pytorch
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.step import Step
from vivace.decode.request import Request
from vivace.engine import Engine, Options
from vivace.errors import DecodingError, NoTokenError
from vivace.methods.table import METHODS

PROMPTS = ("Describe: name[Cotto]", "food[English], area[city centre]", "a b a b a b a b", "near[Cafe Rouge]")
TIMED = ("auto", "auto+")
"""Methods whose drafts depend on the clock."""
Engines = Callable[[str], Engine]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder, dtype = tmp_path_factory.mktemp("methods"), request.param

    @cache
    def get(method: str) -> Engine:
        engine = load_for(folder, method, dtype=dtype)
        engine.steps_per_call = 0  # every draft goes up by a traversal, which is one of the calls that fail here
        return engine

    return get


def requests(engine: Engine, method: str) -> list[Request]:
    """Greedy and drawn ones by turns; only greedy ones where texts that are drawn depend on the clock."""
    found = []
    for place, prompt in enumerate(PROMPTS):
        draws = place % 2 == 1 and method not in TIMED
        more = {"temperature": 1.1, "seed": place} if draws else {}
        options = Options(max_new_tokens=24, ignore_eos=True, method=method, raw=True, logprobs=False, **more)  # type: ignore[arg-type]
        found.append(replace(engine.request(prompt, options), shows_guesses=True))
    return found


def run(engine: Engine, asked: list[Request]) -> list[Outcome]:
    return outcomes(engine.session(asked, Options()), asked)


@not_quick_on_pytorch("engines")
@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_failed_is_made_again_as_if_it_had_not(engines: Engines, method: str) -> None:
    engine = engines(method)
    asked = requests(engine, method)
    expected = run(engine, asked)
    for call, at, is_late in (("run", 2, False), ("run", 4, True), ("commit", 3, True), ("observe", 2, True)):
        plan = Plan(call, at, is_late=is_late, concerns=lambda slots: len(slots) > 1)
        failing = Failing(asked[0].drafter, plan)
        found = run(engine, [replace(request, drafter=failing) for request in asked])
        assert plan.num_failed == 1
        if method in TIMED:
            assert [one.tokens for one in found] == [one.tokens for one in expected]
        else:
            assert found == expected


@not_quick_on_pytorch("engines")
@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_nothing_may_follow_breaks_off_where_it_does_without_drafts(engines: Engines, method: str) -> None:
    """Drafts look beyond that place and may not say so."""
    engine = engines(method)
    greedy, drawn, *_ = requests(engine, method)
    for request in (greedy, drawn):
        (free,) = run(engine, [replace(request, processors=(lambda ids, scores: scores,))])
        (found,) = run(engine, [replace(request, processors=(bars_from(len(request.tokens) + 6),))])
        assert isinstance(found.error, NoTokenError)
        assert "after 6 new ones" in str(found.error)
        if method not in TIMED or request is greedy:
            assert found.tokens == free.tokens[:6]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return vivace.load(make_checkpoint(tmp_path / "tiny"))


def test_generating_says_what_failed_and_the_engine_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.generate(list(PROMPTS), max_new_tokens=8, raw=True)
    inner, count = engine.model.run, 0

    def fail(h: Tensor, step: Step, *args: int) -> Tensor:
        nonlocal count
        count += 1
        if count >= 9:
            raise torch.OutOfMemoryError("planted")
        return inner(h, step, *args)

    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "run", fail)
        with pytest.raises(DecodingError, match="OutOfMemoryError: planted") as raised:
            engine.generate(list(PROMPTS), max_new_tokens=8, raw=True)
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        count = 0
        with pytest.raises(DecodingError, match="planted"):
            list(engine.stream(PROMPTS[0], max_new_tokens=20, ignore_eos=True, raw=True))
    after = engine.generate(list(PROMPTS), max_new_tokens=8, raw=True)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]


@pytest.mark.parametrize("more", [{}, {"temperature": 1e-40}, {"temperature": 100.0, "seed": 3}], ids=str)
def test_an_answer_that_no_token_may_follow_says_so(engine: Engine, more: dict[str, float]) -> None:
    """Every token of the vocabulary once, and then none is left."""
    limit = engine.model.config.max_positions - 2
    assert engine.model.config.vocab_size > limit, "else this needs a longer context"
    banned = {token for token in range(engine.model.config.vocab_size) if token % 8}
    wanted = len(range(0, engine.model.config.vocab_size, 8))

    def few(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(sorted(banned)), -torch.inf)

    options = Options(max_new_tokens=100, ignore_eos=True, no_repeat_ngram_size=1, raw=True, method="lookup", **more)  # type: ignore[arg-type]
    request = replace(engine.request("a", options), processors=(few,))
    (found,) = run(engine, [request])
    assert isinstance(found.error, NoTokenError)
    assert len(set(found.tokens) | set(request.tokens) - banned) == wanted
    with pytest.raises(NoTokenError, match="repeated n-grams"):
        list(_drained(engine, request))
    assert engine.generate("a", max_new_tokens=3, raw=True)


def _drained(engine: Engine, request: Request) -> list[int]:
    session = engine.session([request], Options())
    session.admit(request)
    return [token for emitted in session.drain() for token in emitted.tokens]

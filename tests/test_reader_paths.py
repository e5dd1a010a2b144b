"""The paths that docs/architecture.md tells are short, and they are those that the program takes."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import vivace
from tests.adapters.loras import make_lora
from tests.every_method import make_model
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats
from vivace.engine import Engine, Options

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 4
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)
STEPS_PER_CALL = {"decided": None, "verified": 0}
"""What a session is told on each path of a draft token; None is the default."""
FURTHER: dict[str, dict[str, Any]] = {"prompt": {}, "beams": {"num_beams": 2}, "adapter": {"adapter": "worn"}}
"""The other paths, with the options of a request that takes them."""


def path_of(name: str) -> list[tuple[Path, str]]:
    """Files and functions of a path, as the page has them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = text.partition(f"<!-- begin path: {name} -->")[2].partition(f"<!-- end path: {name} -->")[0]
    return [(ROOT / file, function) for file, function in ROW.findall(told)]


def defines(file: Path, function: str) -> bool:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return re.search(rf"^\s*[\w:*&<>]+ {function}\(", text, re.M) is not None
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("name", [*STEPS_PER_CALL, *FURTHER])
def test_a_reader_opens_few_files(name: str) -> None:
    path = path_of(name)
    assert path
    assert len({file for file, _ in path}) <= MOST_FILES
    missing = [f"{file.name}: {function}" for file, function in path if not defines(file, function)]
    assert not missing, f"docs/architecture.md names functions that are not there: {missing}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """On native kernels where there are some, as by default."""
    return vivace.load(make_model(tmp_path_factory.mktemp("paths"), "multirate"), dtype="bfloat16")


def drained(session: Session) -> tuple[list[tuple[Path, str]], DecodeStats]:
    """Python functions that are entered while a session decodes its requests, in order, and the last one's counters."""
    entered: list[tuple[Path, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.append((Path(frame.f_code.co_filename), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        stats = list(session.drain())[-1].stats
    finally:
        sys.setprofile(before)
    return entered, stats


def calls_of(engine: Engine, steps_per_call: int | None) -> list[tuple[Path, str]]:
    """Python functions that are entered while one greedy request is decoded by a drafter that is wrong at times."""
    options = Options(method="multirate", max_new_tokens=24, ignore_eos=True, do_sample=False, logprobs=False)
    request = engine.request("the quick brown fox", options)
    session = engine.session([request], options)
    session.steps_per_call = steps_per_call
    session.admit(request)
    entered, stats = drained(session)
    assert stats.num_accepted_draft_tokens < stats.num_draft_tokens, "else nothing is rejected"
    return entered


def follow(entered: Sequence[tuple[Path, str]], path: Sequence[tuple[Path, str]]) -> None:
    """Find the functions of a path one behind the other."""
    place = 0
    for step in path:
        assert step in entered[place:], f"{step} is not entered, or too early"
        place = entered.index(step, place)


@pytest.mark.parametrize("name", STEPS_PER_CALL)
def test_the_program_takes_the_path_that_is_told(engine: Engine, name: str) -> None:
    """One function after the other, and never the last one of the other path."""
    if engine.model.backend.chain is None:
        pytest.skip("no native kernels here: nothing is decided in one call")
    entered = calls_of(engine, STEPS_PER_CALL[name])
    told = [step for step in path_of(name) if step[0].suffix == ".py"]
    follow(entered, [step for step in told if step[1] != "_in_steps"])  # native code makes those in one call, too
    ends = {"decided": "verify_greedy", "verified": "speculate"}
    assert ends[name] not in {function for _, function in entered}


def test_without_native_kernels_guesses_are_made_in_steps(tmp_path: Path) -> None:
    engine = vivace.load(make_model(tmp_path, "multirate"), kernels="torch")
    follow(calls_of(engine, None), path_of("verified"))


@pytest.mark.parametrize("name", FURTHER)
def test_further_paths_are_those_that_are_told(tmp_path: Path, name: str) -> None:
    base = make_model(tmp_path / "base", "plain")
    loras = {"worn": make_lora(tmp_path / "worn", base, rank=2)} if name == "adapter" else None
    engine = vivace.load(base, kernels="torch", adapters=loras)
    options = Options(method="plain", max_new_tokens=3, do_sample=False, **FURTHER[name])
    request = engine.request("the quick brown fox", options)
    session = engine.session([request], options)
    session.admit(request)
    follow(drained(session)[0], path_of(name))

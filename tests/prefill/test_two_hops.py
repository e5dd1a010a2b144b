"""Learnt scores from end to end: a model that has to find things is trained, taught and asked (``two_hops.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import vivace
from tests.prefill.two_hops import PASSAGE, PASSAGES, TAIL, question, train
from vivace.engine import Engine
from vivace.prompts import Prompt
from vivace.recipes.lazy import LazyRecipe, learn

pytestmark = pytest.mark.slow

SHARE = 0.3
"""Of the tokens that go on: two passages of eight."""


class Notes:
    """Remembers what a training says."""

    def __init__(self) -> None:
        self.said = list[str]()

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-hops")
    assert train(folder) > 0.97
    return folder


@pytest.fixture(scope="module")
def notes(folder: Path) -> Notes:
    """What was said while the scores were learnt; they lie beside the model then."""
    notes, draws = Notes(), Random(1)
    prompts = [question(draws)[0] for _ in range(100)]
    recipe = LazyRecipe(prompts=100, whole=30, points=(1,), window=TAIL, rank=24, steps=80)
    learn(recipe, vivace.load(folder), prompts, folder / "adapters" / "lazy", notes)  # type: ignore[arg-type]
    return notes


def right(engine: Engine, asked: Sequence[Prompt], way: str | None, keep: str | None = None) -> float:
    """Return the share of questions that are answered with the right word."""
    options: dict[str, Any] = {"method": "plain", "do_sample": False, "max_new_tokens": 1}
    if way is not None:
        options |= {"prefill": way, "min_prompt": 1, **({} if keep is None else {"keep": keep})}
    found = [engine.generate(one.request, **options)[0].text.strip() for one in asked]
    return sum(text == one.references[0] for text, one in zip(found, asked, strict=True)) / len(asked)


def test_learnt_scores_keep_the_passage_that_both_layers_need(folder: Path, notes: Notes) -> None:
    """With two of eight passages the answers are those of a full reading; by chance a quarter of them is there."""
    engine = vivace.load(folder)
    draws = Random(2)
    asked = [question(draws)[0] for _ in range(60)]
    assert right(engine, asked, None) > 0.95
    assert right(engine, asked, "lazy") > 0.9, "the plan is what was taught"
    for score in ("taught", "heads"):
        assert right(engine, asked, "lazy", f"1:{SHARE}:{score}") > 0.9, score
    assert right(engine, asked, "random", f"0:{SHARE}") < 0.45
    assert right(engine, asked, "lexical", f"0:{SHARE}") < 0.6, "question and answer share no word"


def test_the_heads_that_read_what_is_written_are_those_of_the_upper_layer(notes: Notes) -> None:
    [said] = [text for text in notes.said if text.startswith("answers read")]
    assert said.split("heads ")[1].split(", ")[0].endswith("of layer 1"), said


def test_passages_of_the_model_are_lines(folder: Path, notes: Notes) -> None:
    """What goes on are whole passages, and the right one is nearly always among them."""
    engine, draws, kept = vivace.load(folder), Random(3), 0
    maps, config = engine.prefills.learned.maps[1], engine.prefills.learned.config
    from vivace.prefill.lessons import residuals
    from vivace.prefill.passages import by_passages, divide

    for _ in range(40):
        prompt, place = question(draws)
        tokens = list(engine.tokenizer.encode_prompt(prompt.request))
        lengths = divide(tokens, config.breaks, config.window)
        assert len(lengths) == PASSAGES + 2
        hidden = residuals(engine.model, tokens, [1])[1]
        going = by_passages(maps.scores(hidden, lengths), lengths, int(SHARE * len(tokens))).tolist()
        kept += set(range(max(4, place * PASSAGE), (place + 1) * PASSAGE)) <= set(going)
        assert all(a < b for a, b in pairwise(going))
    assert kept >= 36

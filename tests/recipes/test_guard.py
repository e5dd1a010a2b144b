"""A guard that is trained refuses as much in use as its recipe says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.guard.head import Features, load_head
from vivace.errors import ConfigError
from vivace.prompts import Prompt
from vivace.recipes.guard import GuardRecipe, _held_back, _labelled, learn_guard, lowest_threshold, read_texts
from vivace.train.report import Lines

WORDS = ("red", "green", "a", "cup", "of", "tea", "and", "the", "rain", "falls")


def rows(kinds: tuple[str, ...], count: int) -> list[Prompt]:
    """Texts of some words; those of a category have its name somewhere."""
    draws = random.Random(0)
    found = []
    for kind in kinds:
        for _ in range(count):
            words = draws.choices(WORDS, k=12)
            if kind != "ok":
                words[draws.randrange(12)] = kind
            found.append(Prompt(" ".join(words), (kind,)))
    return found


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("kinds", [("ok", "poison"), ("ok", "poison", "weapon")])
def test_refusals_are_as_few_as_the_recipe_says(where: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Answers are judged after every token, so whole rows say too little; categories share the refusals."""
    engine = vivace.load(make_checkpoint(tmp_path / "model"), kernels="torch")
    recipe = GuardRecipe(where=where, false_refusals=0.1, held_back=0.5, penalties=(0.1,))
    given = rows(kinds, 80)
    learn_guard(recipe, engine, given, tmp_path / "guard", Lines(print))
    head = load_head(tmp_path / "guard", engine.folder, engine.model.config.width)
    limits, norm = torch.tensor(head.plan.thresholds), engine.model.norm

    def is_refused(hidden: torch.Tensor) -> torch.Tensor:
        scores = head.scores(Features(hidden.shape[1]).each(norm(hidden).float()))
        return ((scores if where == "output" else scores[-1:]) >= limits).any()

    texts, names = _labelled(recipe, engine, given)
    held = _held_back(names, recipe).tolist()
    allowed = [text for text, name, is_held in zip(texts, names, held, strict=True) if is_held and name == "ok"]
    assert len(allowed) == 40
    assert int(read_texts(engine, allowed, 512, is_refused).sum()) <= 4


def test_scores_that_are_alike_are_not_refused_together() -> None:
    scores = torch.tensor([0.9] * 3 + [0.5] * 40 + [0.1] * 57)
    for share, refused in ((0.05, 3), (0.3, 3), (0.43, 43), (0.01, 0)):
        assert int((scores >= lowest_threshold(scores, share)).sum()) == refused


def test_nothing_is_written_over_the_model(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "model"), kernels="torch")
    before = (engine.folder / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="is the model itself; name another folder for the guard"):
        learn_guard(GuardRecipe(), engine, rows(("ok", "bad"), 4), engine.folder, Lines(print))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file, and a folder is written"):
        learn_guard(GuardRecipe(), engine, rows(("ok", "bad"), 4), tmp_path / "file", Lines(print))
    assert (engine.folder / "config.json").read_bytes() == before

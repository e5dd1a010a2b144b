"""Where a training puts its result."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from vivace.cli.train_beside import _with_text
from vivace.cli.train_flags import TrainFlags
from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.recipes.kinds import recipe_named


def test_a_folder_that_is_named_is_taken() -> None:
    assert TrainFlags(out=Path("here"), model="nowhere").folder("medusa") == Path("here")


def test_in_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert TrainFlags(model=str(tmp_path)).folder("medusa") == tmp_path / "adapters" / "medusa"


def test_in_the_copy_of_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, *, allow_patterns: str(tmp_path / name))
    assert TrainFlags(model="someone/model").folder("medusa") == tmp_path / "someone/model" / "adapters" / "medusa"


@pytest.mark.parametrize("model", [None, "vivace-14m"])
def test_a_model_of_the_package_keeps_its_folder(model: str | None) -> None:
    with pytest.raises(ConfigError, match="say where the result goes: --out DIR"):
        TrainFlags(model=model).folder("medusa")


def test_there_has_to_be_a_model() -> None:
    with pytest.raises(NotFoundError, match="there is no checkpoint directory nowhere"):
        TrainFlags(model="nowhere").folder("medusa")


def test_a_text_without_words_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(CorruptError, match=r"empty\.txt has no text"):
        TrainFlags(data=[tmp_path / "empty.txt"]).prompts(takes_text=True)


def test_minutes_are_those_of_all_members_together() -> None:
    values = {**recipe_named("prompts"), "lengths": [2, 3], "seeds": [0, 1]}
    recipe, _ = _with_text(values, [], TrainFlags(model="nowhere", minutes=8.0, data=[Path("rows.jsonl")]))
    assert recipe.num_trainings == 4
    assert recipe.loop.minutes == 2.0


def test_minutes_are_the_budget_of_a_recipe_that_has_none() -> None:
    values = {**recipe_named("multirate"), "loop": {"warmup_steps": 2}}
    recipe, _ = _with_text(values, [], TrainFlags(model="nowhere", minutes=8.0, data=[Path("rows.jsonl")]))
    assert recipe.loop.minutes == 8.0

"""Recipes as files: found by name or path, changed on the command line, and every one that ships can be followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.methods.bigram.spec import BIGRAM
from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.methods.table import METHODS
from vivace.recipes import kinds
from vivace.recipes.kinds import recipe_of
from vivace.recipes.method import MethodRecipe
from vivace.recipes.reading import RECIPES, override, read_recipe


def test_changes_on_the_command_line() -> None:
    values = {"kind": "a", "inner": {"width": 1}}
    assert override(values, ["inner.rate=2.5", "sizes=[4,5]"]) == {
        "kind": "a",
        "inner": {"width": 1, "rate": 2.5},
        "sizes": [4, 5],
    }
    assert values == {"kind": "a", "inner": {"width": 1}}
    for change in ("inner.rate", "=3", "kind.x=1"):
        with pytest.raises(ConfigError):
            override(values, [change])


def test_a_value_that_is_no_yaml_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"'plan.widths=\[1,1': the value is not YAML") as caught:
        override({}, ["plan.widths=[1,1"])
    assert "\n" not in str(caught.value)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the recipes that come with vivace are base, calm, chat, deed"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(NotFoundError, match="did you mean 'quantized'"):
        read_recipe("quantised")
    assert read_recipe("multirate") == read_recipe(RECIPES / "multirate.yaml")
    for name, text in (("a.yaml", "kind: [a"), ("b.json", "{"), ("c.yaml", "- 1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CorruptError, match=name):
            read_recipe(tmp_path / name)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_ships_can_be_followed(path: Path) -> None:
    values = read_recipe(path)
    recipe = recipe_of(values)
    assert getattr(recipe, "kind") == values["kind"]  # noqa: B009 - every recipe has one, whatever its class
    assert isinstance(recipe, kinds.RECIPES.get(values["kind"], MethodRecipe))


def test_every_kind_that_ships_is_one() -> None:
    assert {read_recipe(path)["kind"] for path in RECIPES.glob("*.yaml")} <= set(kinds.kinds())
    assert set(kinds.RECIPES) < set(kinds.kinds())  # the spec of the other methods describes theirs


def test_a_method_is_trained_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the file that ships for it, or by what its spec implies where there is none."""
    monkeypatch.chdir(tmp_path)
    for method in METHODS.values():
        if method.training == "beside":
            assert recipe_of(kinds.recipe_named(method.name)).kind == method.name  # type: ignore[union-attr]
    monkeypatch.setitem(METHODS, BIGRAM.name, BIGRAM)  # type: ignore[arg-type]
    implied = recipe_of(override(kinds.recipe_named("bigram"), ["loop.minutes=3"]))
    assert isinstance(implied, MethodRecipe)
    assert (implied.kind, implied.loop.minutes) == ("bigram", 3)
    (tmp_path / "bigram").write_text("kind: medusa\nloop: {minutes: 1}")
    assert kinds.recipe_named("bigram")["kind"] == "medusa", "a file of that name goes first"


@pytest.mark.parametrize("kind", ["medussa", None, ["medusa"]])
def test_an_unknown_kind_is_refused_with_those_that_are(kind: object) -> None:
    with pytest.raises(ConfigError, match=f"a recipe's kind is one of {re.escape(', '.join(kinds.kinds()))}, found"):
        recipe_of({"kind": kind})

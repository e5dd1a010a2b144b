"""The method table and strict recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.methods.table import METHODS, find_method
from vivace.recipe import build, override, read_recipe

RECIPES = Path(__file__).resolve().parents[1] / "src" / "vivace" / "recipes"


@dataclass(frozen=True)
class Inner:
    width: int = 3
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner = field(default_factory=Inner)
    sizes: tuple[int, ...] = ()
    limit: int | None = None


def test_the_table_is_the_closed_one() -> None:
    ours = ["auto", "plain", "lookup", "draft", "multirate", "multirate+lookup", "multistream", "dynamic"]
    drafting = ["medusa", "lookahead", "eagle", "deed", "uno", "layerskip"]
    others = ["foresight", "calm", "lite", "skipdecode", "mod"]
    assert list(METHODS) == [*ours, *drafting, *others]
    assert all(method.name == name for name, method in METHODS.items())


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lookup'"):
        find_method("lokup")
    assert find_method("plain").lossless


def test_values_become_dataclasses() -> None:
    made = build(Outer, {"kind": "b", "inner": {"rate": 1}, "sizes": [1, 2], "limit": None})
    assert made == Outer("b", Inner(rate=1.0), (1, 2), None)
    assert isinstance(made.inner.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "b", "iner": {}}, "unknown key iner; did you mean 'inner'"),
        ({"kind": "b", "inner": {"widht": 1}}, "unknown key inner.widht; did you mean 'width'"),
        ({}, "needs kind"),
        ({"kind": "c"}, "kind must be one of a, b, found 'c'"),
        ({"kind": "a", "inner": {"width": "wide"}}, "inner.width must be int, found 'wide'"),
        ({"kind": "a", "inner": {"width": True}}, "inner.width must be int, found True"),
        ({"kind": "a", "sizes": [1, "x"]}, r"sizes\[1\] must be int, found 'x'"),
        ({"kind": "a", "limit": 1.5}, "limit must be int, found 1.5"),
    ],
)
def test_wrong_values_are_named_by_their_path(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, values)


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


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the recipes that come with vivace are base, calm, deed"):
        read_recipe(tmp_path / "none.yaml")
    assert read_recipe("multirate") == read_recipe(RECIPES / "multirate.yaml")
    for name, text in (("a.yaml", "kind: [a"), ("b.json", "{"), ("c.yaml", "- 1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CorruptError, match=name):
            read_recipe(tmp_path / name)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_ships_can_be_followed(path: Path) -> None:
    from vivace.train.decoder import DecoderRecipe
    from vivace.training.confidence import ConfidenceRecipe
    from vivace.training.draft import DraftRecipe
    from vivace.training.mod import ModRecipe
    from vivace.training.run import RECIPES as BESIDE_A_BASE
    from vivace.training.shared import SharedRecipe
    from vivace.training.whole import WholeRecipe

    others = {"draft": DraftRecipe, "shared": SharedRecipe, "decoder": DecoderRecipe, "mod": ModRecipe}
    confident = dict.fromkeys(("calm", "lite"), ConfidenceRecipe)
    whole = dict.fromkeys(("layerskip", "supervised", "skipdecode"), WholeRecipe)
    values = read_recipe(path)
    recipe: Any = build((others | confident | whole | BESIDE_A_BASE)[values["kind"]], values)
    assert getattr(recipe, "kind", values["kind"]) == values["kind"]

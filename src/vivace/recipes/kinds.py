"""The recipe class of every kind of training, by the key ``kind`` of a recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from vivace.configuration import build
from vivace.errors import ConfigError
from vivace.methods.table import METHODS
from vivace.recipes.confidence import ConfidenceRecipe
from vivace.recipes.decoder import DecoderRecipe, WholeRecipe
from vivace.recipes.draft import DraftRecipe
from vivace.recipes.dynamic import DynamicRecipe
from vivace.recipes.foresight import ForesightRecipe
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.method import method_recipe
from vivace.recipes.mod import ModRecipe
from vivace.recipes.multirate import MultirateRecipe
from vivace.recipes.multistream import MultistreamRecipe
from vivace.recipes.shared import SharedRecipe
from vivace.recipes.whole import SupervisedRecipe

RECIPES: Mapping[str, type[FrozenRecipe] | type[WholeRecipe]] = {
    kind: recipe
    for recipe in (
        DecoderRecipe,
        SupervisedRecipe,
        ModRecipe,
        SharedRecipe,
        DraftRecipe,
        MultirateRecipe,
        MultistreamRecipe,
        DynamicRecipe,
        ForesightRecipe,
        ConfidenceRecipe,
    )
    for kind in get_args(get_type_hints(recipe)["kind"])
}
"""Recipe classes by kind; methods that are not here are trained by the recipe that their spec describes."""


def kinds() -> list[str]:
    """List the kinds of recipe: those of models, then every method that can be trained."""
    methods = (spec.name for spec in METHODS.values() if spec.training is not None)
    return list(dict.fromkeys(("decoder", "supervised", "shared", *methods)))


def recipe_of(values: Mapping[str, Any]) -> FrozenRecipe | WholeRecipe:
    """Build the recipe of the kind that the values of a recipe file name.

    Raises:
        ConfigError: the kind is unknown, or the recipe has no such keys or values.
    """
    kind = values.get("kind")
    if kind not in kinds():
        raise ConfigError(f"a recipe's kind is one of {', '.join(kinds())}, found {kind!r}")
    return build(RECIPES[kind] if kind in RECIPES else method_recipe(kind), values)

"""The recipe class of every kind of training, by the key ``kind`` of a recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
from vivace.recipes.lora import LoraRecipe
from vivace.recipes.lowbit import LowBitRecipe
from vivace.recipes.method import method_recipe
from vivace.recipes.mod import ModRecipe
from vivace.recipes.multirate import MultirateRecipe
from vivace.recipes.multistream import MultistreamRecipe
from vivace.recipes.palette import PaletteRecipe
from vivace.recipes.prompts import PromptsRecipe
from vivace.recipes.quantized import QuantizedRecipe
from vivace.recipes.reading import RECIPES as PACKAGED
from vivace.recipes.reading import read_recipe
from vivace.recipes.recover import RecoverRecipe
from vivace.recipes.seq2seq import Seq2SeqRecipe
from vivace.recipes.shared import SharedRecipe
from vivace.recipes.whole import SupervisedRecipe

RECIPES: Mapping[str, type[FrozenRecipe] | type[WholeRecipe] | type[Seq2SeqRecipe]] = {
    kind: recipe
    for recipe in (
        DecoderRecipe,
        Seq2SeqRecipe,
        SupervisedRecipe,
        ModRecipe,
        SharedRecipe,
        DraftRecipe,
        MultirateRecipe,
        MultistreamRecipe,
        DynamicRecipe,
        ForesightRecipe,
        ConfidenceRecipe,
        QuantizedRecipe,
        LoraRecipe,
        PaletteRecipe,
        PromptsRecipe,
        LowBitRecipe,
        RecoverRecipe,
    )
    for kind in get_args(get_type_hints(recipe)["kind"])
}
"""Recipe classes by kind; methods that are not here are trained by the recipe that their spec describes."""

LOOP: Mapping[str, Any] = {"minutes": 20, "warmup_steps": 50, "hold": 0.1}
"""Settings of the loop for a method without a recipe file."""


def kinds() -> list[str]:
    """List the kinds of recipe: those of models, then every method that can be trained."""
    methods = (spec.name for spec in METHODS.values() if spec.training is not None)
    plain = ("decoder", "seq2seq", "supervised", "shared", "lora", "prompts", "palette", "recover", "lowbit")
    kinds = (*plain, *methods)
    return list(dict.fromkeys(kinds))


def recipe_named(name: str) -> dict[str, Any]:
    """Return the values of a recipe file, or those that a method without a file is trained with.

    Args:
        name: a recipe file, the name of one that ships, or a method whose spec describes its training.

    Raises:
        NotFoundError: there is no such file, recipe or method.
        CorruptError: the file is not YAML or JSON, or does not hold a mapping.
    """
    has_file = (PACKAGED / f"{name}.yaml").is_file() or Path(name).exists()
    return {"kind": name, "loop": dict(LOOP)} if name in kinds() and not has_file else read_recipe(name)


def recipe_of(values: Mapping[str, Any]) -> FrozenRecipe | WholeRecipe | Seq2SeqRecipe:
    """Build the recipe of the kind that the values of a recipe file name.

    Raises:
        ConfigError: the kind is unknown, or the recipe has no such keys or values.
    """
    kind = values.get("kind")
    if kind not in kinds():
        raise ConfigError(f"a recipe's kind is one of {', '.join(kinds())}, found {kind!r}")
    return build(RECIPES[kind] if kind in RECIPES else method_recipe(kind), values)

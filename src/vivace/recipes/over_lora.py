"""Training a method's weights over a LoRA: the model that drafts are for is then the adapted one.

The LoRA is added to the model's own matrices in memory, so that every objective sees the adapted model as it sees any
other. The weights lie in the LoRA's folder, ``drafting/METHOD``, and requests that wear it are drafted for with them.
"""

from __future__ import annotations

from pathlib import Path

from vivace.adapters.lora import merge_into, table_of, version_of, why_no_lora
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.lora_config import is_lora
from vivace.checkpoint.peft import load_lora
from vivace.engine import Engine
from vivace.errors import ConfigError, NotFoundError, UnsupportedError
from vivace.methods.table import METHODS
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.regenerate import OverLora


def check_over_lora(recipe: object, folder: Path, *, has_data: bool) -> None:
    """Refuse what cannot be trained over a LoRA, before anything is read.

    Raises:
        ConfigError: the recipe is not of a method that drafts, or its text would be the base's.
        NotFoundError: there is no LoRA in the folder.
    """
    if not isinstance(recipe, FrozenRecipe) or recipe.kind not in METHODS:
        raise ConfigError("--adapter is for the weights of a method that drafts; leave it out")
    if not is_lora(folder):
        raise NotFoundError(f"there is no LoRA in {folder}")
    if recipe.own_tokens or not has_data:
        raise ConfigError(
            "over a LoRA weights learn from --data, as it is or with what the adapted model answers (regenerate=N); "
            "the base would draw the prompts that own_tokens asks for"
        )


def wear(engine: Engine, folder: Path) -> OverLora:
    """Make an engine's model the adapted one, for good, and return the LoRA.

    Raises:
        CheckpointError: the LoRA is broken or of another base.
        UnsupportedError: the model takes none.
    """
    if (reason := why_no_lora(engine.model)) is not None:
        raise UnsupportedError(f"this model takes no LoRA: {reason}")
    read = load_lora(folder, table_of(engine.folder, engine.model), base_hash(engine.folder))
    merge_into(engine.model, read.factors)
    return OverLora(folder, version_of(folder))

"""Reads recipe files (YAML or JSON), by path or by name for those of the package, and applies changes to them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vivace.errors import ConfigError, CorruptError, NotFoundError, nearest

RECIPES = Path(__file__).parent
"""Folder of the recipes that come with the package."""


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Read a recipe file into a mapping.

    Args:
        name: a YAML or JSON file, or the name of a recipe that comes with the package.

    Raises:
        NotFoundError: there is no such file or name.
        CorruptError: the file is not YAML or JSON, or does not hold a mapping.
    """
    path = RECIPES / f"{name}.yaml" if (RECIPES / f"{name}.yaml").is_file() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        packaged = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        hint = nearest(str(name), packaged)
        if "did you mean" not in hint:
            hint = f"; the recipes that come with vivace are {', '.join(packaged)}"
        raise NotFoundError(f"cannot read the recipe {path}: {exc.strerror}{hint}") from exc
    try:
        loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise CorruptError(f"{path} is not valid YAML or JSON: {' '.join(str(exc).split())}") from exc
    if not isinstance(loaded, dict):
        raise CorruptError(f"{path} must hold a mapping, found {type(loaded).__name__}")
    return loaded


def override(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a recipe with ``section.key=value`` changes applied; values are read as YAML.

    Raises:
        ConfigError: a change has another form, or names a value as if it were a section.
    """
    changed = copy.deepcopy(dict(values))
    for change in changes:
        path, equals, text = change.partition("=")
        *sections, key = path.split(".")
        if not equals or not all([*sections, key]):
            raise ConfigError(f"{change!r} is not a change; write section.key=value")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{change!r}: {section} is a value, not a section")
        try:
            place[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{change!r}: the value is not YAML") from error
    return changed

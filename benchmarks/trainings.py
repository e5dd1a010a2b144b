"""How long the weights of each method were trained, over all stages, so that rows of a table can be compared.

A result may have its own facts (``{"steps": ..., "minutes": ...}``); those of weights that ship are in
``trainings.json``, which repeats what the model card and the log record. A widened model has the weights of its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.captions import NOT_RECORDED
from vivace.evaluate.peers import PEERS
from vivace.methods.table import METHODS

FILE = Path(__file__).with_name("trainings.json")
UNTRAINED = "none"
"""Text for methods without weights."""


@cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the recorded trainings by model and method."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def training(model: str, method: str, own: Mapping[str, Any] | None = None) -> str:
    """Return the steps of every stage and the minutes of a method's training on a model, as text.

    Args:
        model: name of its folder; a widened copy, ``NAME-x4``, has the same weights.
        method: name of the method in tables; a variant with a name of its own has facts of its own.
        own: facts stored with the result.
    """
    if own is not None:
        return f"{own['steps']} steps, {own['minutes']:.0f} min"
    name = method.partition("@")[0]
    if name == "auto":
        return "that of its methods"
    if name in PEERS:
        return UNTRAINED
    kind = METHODS[name].adapter or name if name in METHODS else name
    if name in METHODS and METHODS[name].adapter is None and name != "draft":
        return UNTRAINED
    found = recorded().get(re.sub(r"-x\d+$", "", model), {}).get(kind)
    return NOT_RECORDED if found is None else _said(found)


def _said(found: Mapping[str, Any]) -> str:
    """Return recorded facts as text."""
    stages = found["stages"]
    steps = [stage["steps"] for stage in stages]
    minutes = f"{found['minutes']} min" if found["minutes"] is not None else f"minutes {NOT_RECORDED}"
    if None not in steps:
        shown = f"{sum(steps):,} steps"
        return f"{shown} ({' + '.join(map(str, steps))}), {minutes}" if len(steps) > 1 else f"{shown}, {minutes}"
    known = " + ".join(f"{stage['what']} {_steps(stage['steps'])}" for stage in stages)
    return f"steps {NOT_RECORDED} ({len(stages)} stages), {minutes}" if not any(steps) else f"{known}, {minutes}"


def _steps(count: int | None) -> str:
    """Return a number of steps as text."""
    return f"(steps {NOT_RECORDED})" if count is None else f"{count} steps"

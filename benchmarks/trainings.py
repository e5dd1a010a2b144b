"""What a method's weights were trained with: all stages, so that rows can be compared; what nobody recorded is said.

A result may carry its own facts (``{"steps": ..., "minutes": ...}``); those of weights that ship are in
``trainings.json``, which repeats what their model card and the log say. A wide twin has the weights of its model.
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


@cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """By model and method."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def training(model: str, method: str, own: Mapping[str, Any] | None = None) -> str:
    """Steps of every stage and minutes of a method's training on a model.

    Args:
        model: the name of its folder; the twin of a model, ``NAME-x4``, has its weights.
        method: as it is called in tables; a variant with a name of its own has facts of its own.
        own: facts that lie with the result.
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
    stages = found["stages"]
    steps = [stage["steps"] for stage in stages]
    minutes = f"{found['minutes']} min" if found["minutes"] is not None else f"minutes {NOT_RECORDED}"
    if None not in steps:
        shown = f"{sum(steps):,} steps"
        return f"{shown} ({' + '.join(map(str, steps))}), {minutes}" if len(steps) > 1 else f"{shown}, {minutes}"
    known = " + ".join(f"{stage['what']} {_steps(stage['steps'])}" for stage in stages)
    return f"steps {NOT_RECORDED} ({len(stages)} stages), {minutes}" if not any(steps) else f"{known}, {minutes}"


def _steps(count: int | None) -> str:
    return f"(steps {NOT_RECORDED})" if count is None else f"{count} steps"

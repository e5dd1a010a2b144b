"""``vivace train guard``: a head that judges prompts or answers while the model reads or writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.cli.console import console
from vivace.errors import ConfigError
from vivace.prompts import Prompt

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.train.report import Report

GUARD = "guard"
"""What names guards beside the methods."""


def train_guard(
    engine: Engine, changes: Sequence[str], prompts: Sequence[Prompt], out: Path, report: Report, *, as_json: bool
) -> None:
    """Learn a head on prompts whose references are categories, and print how good it is.

    Raises:
        ConfigError: there are no rows, or a change is unknown.
    """
    from vivace.configuration import build
    from vivace.recipes.guard import GuardRecipe, learn_guard
    from vivace.recipes.reading import override

    if not prompts:
        raise ConfigError("say what to learn from: --data FILE with rows whose reference is a category, or ok")
    recipe = build(GuardRecipe, override({}, changes))
    found = learn_guard(recipe, engine, prompts, out, report)
    if as_json:
        console.json({"out": str(out), "categories": [asdict(each) for each in found]})
        return
    rows = [[e.category, str(e.num_rows), f"{e.area:.3f}", f"{e.hits:.0%}", f"{e.threshold:.3f}"] for e in found]
    heads = ["category", "rows", "area under the curve", f"found at {recipe.false_refusals:.0%} refusals", "threshold"]
    console.table("", heads, rows)
    console.note(f"wrote {out}; use it: --guard {out}")

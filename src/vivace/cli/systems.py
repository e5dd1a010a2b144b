"""Facts about the methods in a benchmark besides their answers: draft plans, layers per step, memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import ConfigError
from vivace.methods.table import METHODS

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import BenchmarkPrompt
    from vivace.evaluate.memory import Holdings
    from vivace.evaluate.systems import MethodSystem

STEPS_BEFORE_COUNTING = 3
"""Number of steps after which a drafter has allocated everything that it works with."""


def method_of(name: str) -> str:
    """Return the method in a name that may carry an agreement target: ``"dynamic"`` for ``"dynamic@0.98"``."""
    return name.partition("@")[0]


def planned_engines(engine: Engine, names: Sequence[str], file: Path | None) -> dict[str, Engine]:
    """Return an engine for each name, which drafts by the plan in the file if there is one.

    Raises:
        ConfigError: the file is not a JSON object of plans, or has a plan for a method that is not measured.
    """
    from vivace.methods.composition import plan_of
    from vivace.tuning import planned

    engines = dict.fromkeys(names, engine)
    if file is None:
        return engines
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plans {file}: {error}") from error
    unused = sorted(set(values) - set(names)) if isinstance(values, dict) else ["no object"]
    if unused:
        raise ConfigError(f"--plans {file} is for methods of --methods; found {', '.join(unused)}")
    return engines | {name: planned(engine, plan_of(method_of(name), plan)) for name, plan in values.items()}


def drafting(engine: Engine | None, name: str) -> dict[str, Any]:
    """Return a method's draft plan and the number of layers that a step runs; empty for lossy methods and other
    engines.
    """
    from vivace.decode.shallow import DraftPlan
    from vivace.evaluate.step_layers import layers_of_step
    from vivace.methods.draft.drafter import DraftModel

    if engine is None or not METHODS[method_of(name)].lossless:
        return {}
    drafter = engine.methods.drafter(method_of(name))
    plan = getattr(drafter, "plan", None)
    if isinstance(drafter, DraftModel):
        plan = DraftPlan.chain(drafter.config.num_draft_tokens)
    layers = layers_of_step(drafter, engine.model.config.num_layers)
    return {
        "plan": getattr(plan, "label", None),
        "layers_per_step": None if name == "auto" else {"verify": layers.verify, "draft": layers.draft},
    }


def libraries_memory() -> int | None:
    """Return the resident memory in bytes after importing all that a benchmark needs and before reading a model."""
    from vivace.evaluate.memory import resident_memory

    import_module("vivace.engine")
    return resident_memory()


def holdings(engine: Engine, system: MethodSystem, questions: Sequence[BenchmarkPrompt]) -> Holdings:
    """Measure the memory that a method holds for some prompts at once, in the middle of its answers."""
    from vivace.engine import Options
    from vivace.evaluate.memory import holdings_of

    settings = {"method": method_of(system.name), "max_new_tokens": system.max_new_tokens, "do_sample": False}
    options = Options.of({**settings, "batch_size": len(questions), "quality": system.quality})
    requests = [engine.request_for(question.token_ids, options) for question in questions]
    session = engine.session(requests, options)
    for request in requests:
        session.admit(request)
    state = session.drafting(requests[0].drafter)
    for _ in range(STEPS_BEFORE_COUNTING):
        if not session.is_idle:
            session.step()
    found = holdings_of(session, requests[0].drafter, state)
    list(session.drain())  # so that the drafter frees the state of these sequences
    return found

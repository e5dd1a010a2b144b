"""Finding the shape of a draft by measuring: what pays depends on the machine, the kernels and the prompts.

A draft that is long or wide keeps more guesses a pass and costs more to make and to verify. No formula is
asked which wins: plans play against each other and plain decoding, in turns on the same prompts, and half of
them leave after each round while the prompts left for the others double (successive halving, Jamieson &
Talwalkar 2016, arXiv:1502.07943).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from vivace.checkpoint.adapters import base_hash, load_adapter, replace_plan, save_adapter
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import BenchmarkPrompt, Run, Trial, run_benchmark, summarise
from vivace.evaluate.systems import MethodSystem
from vivace.methods.composition import stored_of
from vivace.methods.spec import Plan
from vivace.methods.table import METHODS

BASELINE = "plain"
_FIRST_PROMPTS = 8
_FINALISTS = 3


@dataclass(frozen=True)
class TunedPlan:
    """What a plan did in the last round it played."""

    plan: Plan
    run: Run
    num_prompts: int


@dataclass(frozen=True)
class _Player:
    """Fills ``System``: a method under one plan."""

    name: str
    system: MethodSystem

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        return self.system.answer(batch)


def tuned_methods() -> list[str]:
    """Names of the methods whose draft has a shape to find."""
    return [spec.name for spec in METHODS.values() if spec.is_tuned]


def candidates_of(engine: Engine, method: str, longest: int = 8) -> list[Plan]:
    """What to try for a method.

    Args:
        engine: the model with the method's adapter.
        method: its name.
        longest: guesses in a row at most.

    Raises:
        ConfigError: ``longest`` below 1, or the method has no draft to tune.
    """
    plans = METHODS[method].plans if method in METHODS else None
    if plans is None:
        raise ConfigError(f"{method!r} has no draft to tune; one of {', '.join(tuned_methods())} has")
    if longest < 1:
        raise ConfigError(f"the longest draft must be at least 1, found {longest}")
    return list(plans(partial(_trained, engine, method), longest))


def _trained(engine: Engine, kind: str) -> Mapping[str, Any]:
    """What the weights of a kind are for, as their file says; nothing where a model has no folder."""
    folder = engine.methods.adapter_folder(kind)
    return {} if folder is None else load_adapter(folder)[0]["config"]


def keep_plan(engine: Engine, method: str, plan: Plan) -> str:
    """Write a plan down where the method finds it; returns where.

    A method without weights gets a folder that holds nothing else.

    Raises:
        ConfigError: a draft model is no adapter; how far it drafts is said when it is used.
    """
    folder = engine.methods.adapter_folder(method)
    assert folder is not None, "the engine is made from a checkpoint"
    if not METHODS[method].keeps_plan:
        raise ConfigError("a draft model keeps no plan; give --num-draft-tokens where it is used, and --no-keep here")
    shape = asdict(cast(Any, plan))
    if folder.is_dir():
        replace_plan(folder, shape)
    else:
        make = stored_of(method).default_config
        config = {} if make is None else asdict(make(engine.model.config))
        save_adapter(folder, method, base_hash(engine.folder), shape, config, {})
    return str(folder)


def search(
    engine: Engine,
    method: str,
    plans: Sequence[Plan],
    questions: Sequence[BenchmarkPrompt],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> list[TunedPlan]:
    """Let plans play until three are left; those play on all prompts.

    Args:
        engine: the model, with the kernels that will decode.
        method: whose draft it is, such as "multirate".
        plans: who plays.
        questions: prompts; the last round takes all.
        max_new_tokens: longest answer.
        batch_size: prompts decoded together.
        on_round: told before each round how many plans play on how many prompts.

    Returns:
        Every plan's last round, fastest of the last round first, then those that left later before those that
        left earlier.

    Raises:
        ConfigError: no plan or no prompt.
    """
    if not plans or not questions:
        raise ConfigError(f"a search needs a plan and a prompt, found {len(plans)} plans and {len(questions)} prompts")
    plain = MethodSystem(BASELINE, engine, max_new_tokens)
    players = {plan: _Player(plan.label, MethodSystem(method, planned(engine, plan), max_new_tokens)) for plan in plans}
    left, count, gone = list(players), _FIRST_PROMPTS, list[TunedPlan]()
    while True:
        last = len(left) <= _FINALISTS
        asked = questions if last else questions[:count]
        if on_round is not None:
            on_round(len(left), len(asked))
        records = run_benchmark(
            [plain, *(players[plan] for plan in left)], asked, batch_size=batch_size, repeats=3 if last else 1
        )
        runs = summarise(records, BASELINE)[1:]
        trials = [TunedPlan(plan, run, len(asked)) for plan, run in zip(left, runs, strict=True)]
        trials.sort(key=lambda trial: trial.run.tokens_per_s, reverse=True)
        if last:
            return [*trials, *gone]
        kept = max(_FINALISTS, len(left) // 2)
        gone = [*trials[kept:], *gone]
        left = [trial.plan for trial in trials[:kept]]
        count *= 2


def planned(engine: Engine, plan: Plan) -> Engine:
    """The same engine, drafting after another plan than its adapter's."""
    other = copy(engine)
    other.methods = engine.methods.planned(plan)
    return other

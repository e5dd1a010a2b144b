"""Finding the best shape of a draft by measuring, since it depends on the machine, the kernels and the prompts.

A longer or wider draft has more tokens accepted per forward pass and costs more to make and to verify. Instead of
predicting which plan wins, plans are measured against each other and plain decoding, in turns on the same prompts.
After each round the slower half of them is dropped and the number of prompts doubles (successive halving, Jamieson &
Talwalkar 2016, arXiv:1502.07943).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from vivace.checkpoint.adapters import base_hash, load_adapter, replace_plan, save_adapter
from vivace.checkpoint.draft_vocabulary import has_vocabulary, ranked, save_vocabulary
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, Run, run_benchmark, summarise
from vivace.evaluate.systems import MethodSystem
from vivace.methods.composition import stored_of
from vivace.methods.spec import Plan
from vivace.methods.table import METHODS

BASELINE = "plain"
SIZES = (4096, 8192, 16384, 32768)
"""Sizes of the draft vocabulary that are tried, besides all tokens."""
_FIRST_PROMPTS = 8
"""Number of prompts in the first round."""
FINALISTS = 3
"""Number of plans that are measured on all prompts."""


@dataclass(frozen=True)
class TunedPlan:
    """The measurement of a plan in the last round that it took part in."""

    plan: Plan
    run: Run
    num_prompts: int


def tuned_methods() -> list[str]:
    """Return the names of the methods whose drafts have a shape to search."""
    return [spec.name for spec in METHODS.values() if spec.is_tuned]


def candidates_of(engine: Engine, method: str, longest: int = 8) -> list[Plan]:
    """Return the plans to try for a method.

    Args:
        engine: the model with the method's adapter.
        method: name of the method.
        longest: largest number of draft tokens in a row.

    Raises:
        ConfigError: ``longest`` is below 1, or the method has no draft to tune.
    """
    plans = METHODS[method].plans if method in METHODS else None
    sizes = _sizes(engine, method)
    middle = sizes[len(sizes) // 2] if sizes else 0
    if plans is None:
        raise ConfigError(f"{method!r} has no draft to tune; one of {', '.join(tuned_methods())} has")
    if longest < 1:
        raise ConfigError(f"the longest draft must be at least 1, found {longest}")
    found = plans(partial(_trained, engine, method), longest)
    return [replace(cast(Any, plan), vocabulary=middle) for plan in found] if middle else list(found)


def _sizes(engine: Engine, method: str) -> list[int]:
    """Return the sizes of the draft vocabulary to try, smallest first; none where there is no vocabulary."""
    known = has_vocabulary(engine.methods.adapter_folder(method))
    return [size for size in SIZES if size < engine.model.config.vocab_size] if known else []


def vocabulary_candidates(engine: Engine, method: str, best: Sequence[Plan]) -> list[Plan]:
    """Return the plans ``best`` with every size of the draft vocabulary, and with all tokens.

    ``candidates_of`` gives all plans the same size, since it changes how much a guess costs and not which shape a draft
    has; so shapes are searched first, and sizes of the best of them afterwards.
    """
    sizes = _sizes(engine, method)
    return [replace(cast(Any, plan), vocabulary=size) for plan in best for size in (*sizes, 0)] if sizes else []


def write_vocabulary(engine: Engine, method: str, answers: Sequence[str]) -> str:
    """Rank the tokens of the model's answers and write them beside a method's weights; return the folder.

    A method without weights gets a folder that contains its plan and the tokens.
    """
    folder = engine.methods.adapter_folder(method)
    assert folder is not None, "the engine is made from a checkpoint"
    if not folder.is_dir() and METHODS[method].adapter is None:
        stored = stored_of(method)
        keep_plan(engine, method, cast(Plan, (stored.trained_plan or stored.plan)()))
    elif not folder.is_dir():
        engine.methods.trained(method)  # says how to train the weights that are missing
    tokens = (engine.tokenizer.encode(answer, special=False) for answer in answers)
    save_vocabulary(folder, ranked(tokens, engine.tokenizer.eos_ids, engine.model.config.vocab_size))
    return str(folder)


def _trained(engine: Engine, kind: str) -> Mapping[str, Any]:
    """Return the configuration that the weights of a method were trained with; empty if the model has no folder."""
    folder = engine.methods.adapter_folder(kind)
    return {} if folder is None else load_adapter(folder)[0]["config"]


def keep_plan(engine: Engine, method: str, plan: Plan) -> str:
    """Write a plan into the method's adapter and return the adapter's folder.

    A method without weights gets a folder that contains nothing but the plan.

    Raises:
        ConfigError: the method keeps no plan; the length of its drafts is given when it is used.
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
    """Measure plans in rounds until three are left, and measure those on all prompts.

    Args:
        engine: the model, with the kernels that will decode.
        method: name of the method, such as "multirate".
        plans: the plans to compare.
        questions: the prompts; the last round uses all of them.
        max_new_tokens: length limit of an answer.
        batch_size: number of prompts decoded together.
        on_round: called before each round with the number of plans and the number of prompts.

    Returns:
        The last measurement of every plan: first those of the last round, the fastest first, then those that were
        dropped, the latest first.

    Raises:
        ConfigError: there is no plan or no prompt.
    """
    if not plans or not questions:
        raise ConfigError(f"a search needs a plan and a prompt, found {len(plans)} plans and {len(questions)} prompts")
    plain = MethodSystem(BASELINE, engine, max_new_tokens)
    players = {plan: Named(plan.label, MethodSystem(method, planned(engine, plan), max_new_tokens)) for plan in plans}
    left, count, gone = list(players), _FIRST_PROMPTS, list[TunedPlan]()
    while True:
        last = len(left) <= FINALISTS
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
        kept = max(FINALISTS, len(left) // 2)
        gone = [*trials[kept:], *gone]
        left = [trial.plan for trial in trials[:kept]]
        count *= 2


def planned(engine: Engine, plan: Plan) -> Engine:
    """Return a copy of the engine that drafts by another plan than its adapter's; models and weights are shared."""
    return engine.drafting_by(engine.methods.planned(plan))

"""``vivace tune``: find the fastest draft on this machine for the given prompts, and keep it in the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.lazy import tune_lazy
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Limit, Prompts, questions_of, read_prompts
from vivace.cli.runahead import RUNAHEAD, tune_runahead
from vivace.errors import ConfigError
from vivace.prefill.table import PREFILLS
from vivace.prompts import load_prompts

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import BenchmarkPrompt
    from vivace.methods.spec import Plan
    from vivace.tuning import TunedPlan

PRUNING = [spec.name for spec in PREFILLS.values() if spec.keep is not None]
"""Ways of reading whose schedules are searched."""


@dataclass(frozen=True)
class DraftFlags:
    """Flags that say which drafts are tried, and how."""

    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=2)] = 64
    longest: Annotated[int, typer.Option(help="Longest draft that is tried.", min=1)] = 8
    batch: Annotated[int, typer.Option(help="Prompts decoded together.", min=1)] = 1
    answers: Annotated[
        Path | None,
        typer.Option(help="A file of the model's answers, to make the draft vocabulary from.", metavar="FILE"),
    ] = None


@options.grouped
def tune(
    *,
    method: Annotated[
        str,
        typer.Argument(
            help="The method whose draft is searched; or lazy or another prefill: how prompts are pruned; or runahead."
        ),
    ] = "multirate",
    model: options.Model = None,
    prompts: Prompts = "e2e",
    limit: Limit = 48,
    drafts: DraftFlags,
    floor: Annotated[
        float | None,
        typer.Option(
            help="lazy and other prefills: share of the full reading's likelihood that has to be kept; left out: 0.99."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="runahead: tokens of the prompts, with commas; 4k is 4096. Left out: 1k,2k,4k."),
    ] = None,
    load: options.LoadFlags,
    ranks: options.ParallelFlags,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Write the winner into the adapter.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Measure drafts of many shapes against plain decoding; the fastest becomes the adapter's plan."""
    if method in PRUNING:
        if drafts != DraftFlags():
            raise ConfigError(f"{method} reads prompts: leave out --answers, --max-new-tokens, --longest and --batch")
        if lengths is not None or ranks != options.ParallelFlags():
            raise ConfigError(f"--lengths and flags of ranks have no effect on {method}; leave them out")
        engine = open_engine(model, (), load)
        rows = read_prompts(prompts, limit)
        tune_lazy(engine, rows, 0.99 if floor is None else floor, name=method, keep=keep, as_json=as_json)
    elif method == RUNAHEAD:
        if floor is not None or drafts != DraftFlags():
            raise ConfigError(
                "runahead divides prompts: leave out --floor, --answers, --max-new-tokens, --longest and --batch"
            )
        texts = [str(row.request) for row in read_prompts(prompts, limit)]
        tune_runahead(model, "1k,2k,4k" if lengths is None else lengths, texts, load, ranks, keep=keep, as_json=as_json)
    else:
        if lengths is not None or ranks != options.ParallelFlags():
            raise ConfigError(
                f"--lengths and flags of ranks have no effect on {method}; leave them out, or tune runahead"
            )
        if floor is not None:
            raise ConfigError(f"--floor has no effect on {method}; leave it out, or tune lazy")
        _check_method(method, keep=keep)
        engine = open_engine(model, [method], load)
        if drafts.answers is not None:
            _write_vocabulary(engine, method, drafts.answers)
        asked = questions_of(engine, read_prompts(prompts, limit), raw=False)
        _tune_drafts(engine, method, asked, drafts, keep=keep, as_json=as_json)


def _check_method(method: str, *, keep: bool) -> None:
    """Refuse a method whose drafts have no shape, or none that could be kept."""
    from vivace.tuning import tuned_methods

    if method not in tuned_methods():
        others = f"{', '.join(tuned_methods())}, or a prefill: {', '.join(PRUNING)}"
        raise ConfigError(f"{method!r} has no draft to tune; choose from {others}")
    if method == "draft" and keep:
        raise ConfigError("a draft model keeps no plan; give --no-keep, and --num-draft-tokens where it is used")


def _write_vocabulary(engine: Engine, method: str, answers: Path) -> None:
    """Make the draft vocabulary of a method from the answers in a prompt file."""
    from vivace.tuning import write_vocabulary

    texts = [text for row in load_prompts(answers) for text in row.references]
    if not texts:
        raise ConfigError(f'{answers} has no row with a "reference", whose tokens could be counted')
    place = write_vocabulary(engine, method, texts)
    console.note(f"wrote the tokens of {len(texts)} answers, by frequency, to {place}")


def _tune_drafts(
    engine: Engine, method: str, asked: Sequence[BenchmarkPrompt], flags: DraftFlags, *, keep: bool, as_json: bool
) -> None:
    """Measure the drafts of a method, then the best ones with smaller vocabularies; print them and keep the winner."""
    from vivace.tuning import FINALISTS, candidates_of, keep_plan, search, vocabulary_candidates

    def measured(plans: Sequence[Plan]) -> list[TunedPlan]:
        return search(
            engine,
            method,
            plans,
            asked,
            max_new_tokens=flags.max_new_tokens,
            batch_size=flags.batch,
            on_round=lambda plans, prompts: console.note(f"measuring {plans} drafts on {prompts} prompts"),
        )

    trials = measured(candidates_of(engine, method, flags.longest))
    if sized := vocabulary_candidates(engine, method, [trial.plan for trial in trials[:FINALISTS]]):
        trials = [*measured(sized), *trials[FINALISTS:]]
    if as_json:
        console.json({"method": method, "kernels": engine.kernels.name, "trials": [asdict(trial) for trial in trials]})
    else:
        _print(trials)
    best = trials[0]
    if not keep:
        return
    if best.run.speedup <= 1:
        console.note("no draft beat plain decoding here; the adapter keeps its plan")
        return
    folder = keep_plan(engine, method, best.plan)
    console.note(f"the plan in {folder} is now: {best.plan.label}")


def _print(trials: list[TunedPlan]) -> None:
    """Print one row for each trial."""
    rows = [
        [
            trial.plan.label,
            str(trial.num_prompts),
            f"{trial.run.tokens_per_s:.1f}",
            f"{trial.run.speedup:.2f}x",
            f"{trial.run.tokens_per_target_pass or 0:.2f}",
            "yes" if trial.run.identical else "no",
        ]
        for trial in trials
    ]
    console.table("", ["draft", "prompts", "tokens/s", "speed-up", "tokens/pass", "identical"], rows)

"""``vivace demo``: sample answers, the speed of each method, and whether the answers are identical, in a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.bench import BASELINE, facts, print_runs, roofline_note
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.prompting import questions_of, split_names
from vivace.errors import ConfigError, nearest
from vivace.methods.spec import DRAFTS_NOTHING
from vivace.methods.table import METHODS
from vivace.prompts import PACKAGED, TASKS, packaged_prompts

if TYPE_CHECKING:
    from vivace.engine import Engine

METHODS_SHOWN = ("plain", "lookup", "multirate")
"""Methods that are compared on the model that ships."""
DRAFTS = ("quantized", "multirate")
"""What is proposed for a model that nothing was trained on: the first that can run on it."""
NUM_SAMPLES = 2
MAX_NEW_TOKENS = 96
BEYOND = "Why is the sky blue?"
"""A question that the model that ships was not trained for, and does not answer."""


def demo(
    model: options.Model = None,
    ignore_config_key: options.IgnoreConfigKey = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help=f"Packaged prompts, with commas: {', '.join(PACKAGED)}. Left out: those that the model that ships was "
            "trained for, chat for any other model."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each task that are timed.", min=1, max=100)] = 8,
    repeats: Annotated[int, typer.Option(help="Times each is answered by every method.", min=1)] = 2,
    as_json: options.AsJson = False,
) -> None:
    """Answer the packaged prompts with several methods; show answers, speeds and whether the answers are identical."""
    from dataclasses import asdict

    from vivace.engine import SHIPPED
    from vivace.evaluate.benchmark import run_benchmark, summarise
    from vivace.evaluate.systems import MethodSystem

    sets = None if tasks is None else [packaged_set(name) for name in split_names(tasks)]
    if sets == []:
        raise ConfigError("--tasks names none; leave it out for all that suit the model")
    engine = open_engine(model, (), options.LoadFlags(ignore_config_key=ignore_config_key))
    is_shipped = engine.folder == SHIPPED
    names = methods_shown(engine, is_shipped=is_shipped)
    if sets is None:
        sets = list(TASKS) if is_shipped else ["chat"]
    samples: dict[str, Any] = {}
    report: dict[str, Any] = {"samples": samples, "runs": {}}
    for task in sets:
        rows = packaged_prompts(task)[:prompts]
        answers = engine.generate(
            [row.request for row in rows[:NUM_SAMPLES]], method=BASELINE, max_new_tokens=MAX_NEW_TOKENS
        )
        samples[task] = [{"prompt": row.request, "text": a.text} for row, a in zip(rows, answers, strict=False)]
        systems = [MethodSystem(name, engine, MAX_NEW_TOKENS) for name in names]
        with console.progress(task) as progress:
            records = run_benchmark(
                systems, questions_of(engine, rows, raw=False), repeats=repeats, on_progress=progress
            )
        runs = summarise(records, BASELINE)
        report["runs"][task] = [asdict(run) for run in runs]
        if not as_json:
            show_samples(samples[task])
            print_runs(runs)
            for run in runs:
                console.result(f"{run.method}: identical: {'yes' if run.identical else 'no'}")
    if is_shipped and tasks is None:
        [beyond] = engine.generate([BEYOND], method=BASELINE, max_new_tokens=MAX_NEW_TOKENS)
        samples["beyond"] = [{"prompt": BEYOND, "text": beyond.text}]
        if not as_json:
            console.result("\nIt has learnt these two tasks and nothing else; what it makes of another question:")
            show_samples(samples["beyond"])
    report |= facts(engine)
    if as_json:
        console.json(report)
    else:
        console.note(roofline_note(report["roofline"]))
    if not all(run["identical"] for runs in report["runs"].values() for run in runs):
        raise typer.Exit(1)


def methods_shown(engine: Engine, *, is_shipped: bool) -> list[str]:
    """Return the methods to compare: on the model that ships ``METHODS_SHOWN``, on others plain, lookup and all
    lossless ones that something was trained for.
    """
    from vivace.checkpoint.files import named_file

    ready = engine.methods.ready()
    if is_shipped:
        return [name for name in METHODS_SHOWN if name in ready]
    trained = [name for name in ready if METHODS[name].adapter is not None and METHODS[name].lossless]
    idle = []
    if engine.storage is None:  # what drafts nothing loads weights ahead of time, and all of them are here
        idle = [name for name in trained if METHODS[name].no_length == DRAFTS_NOTHING]
        trained = [name for name in trained if name not in idle]
    for name in idle:
        console.note(
            f"{name} is left out, since all weights are in memory: vivace convert STORE --store --model "
            f"{named_file(engine.folder)} writes what it is for"
        )
    if not trained and not idle:
        kind = next(name for name in DRAFTS if METHODS[name].reason_against(engine.model) is None)
        console.note(
            f"nothing was trained on this model; `vivace train {kind} --model {named_file(engine.folder)}` makes "
            "drafts for it"
        )
    return ["plain", "lookup", *trained]


def packaged_set(name: str) -> str:
    """Return the name of a packaged set.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PACKAGED:
        raise ConfigError(f"no packaged prompt set {name!r}{nearest(name, PACKAGED)}")
    return name


def show_samples(samples: list[dict[str, Any]]) -> None:
    """Print prompts and their answers."""
    for sample in samples:
        console.result(f"\n> {sample['prompt']}\n{sample['text']}")

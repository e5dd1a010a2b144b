"""``vivace demo``: sample answers, the speed of each method, and whether the answers are identical, in a minute."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.bench import BASELINE, facts, print_runs, roofline_note
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.prompting import questions_of
from vivace.prompts import PACKAGED, packaged_prompts

METHODS_SHOWN = ("plain", "lookup", "multirate")
"""Methods that are compared, as far as the model has what they need."""
NUM_SAMPLES = 2
MAX_NEW_TOKENS = 96


def demo(
    model: options.Model = None,
    ignore_config_key: options.IgnoreConfigKey = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each task that are timed.", min=1, max=100)] = 8,
    repeats: Annotated[int, typer.Option(help="Times each is answered by every method.", min=1)] = 2,
    as_json: options.AsJson = False,
) -> None:
    """Answer the packaged prompts with several methods; show answers, speeds and whether the answers are identical."""
    from dataclasses import asdict

    from vivace.evaluate.benchmark import run_benchmark, summarise
    from vivace.evaluate.systems import MethodSystem

    engine = open_engine(model, (), options.LoadFlags(ignore_config_key=ignore_config_key))
    names = [name for name in METHODS_SHOWN if name in engine.methods.ready()]
    for name in METHODS_SHOWN:
        if name not in names:
            console.note(f"{name} is left out: this model has no adapter for it (vivace doctor says what is missing)")
    samples: dict[str, Any] = {}
    report: dict[str, Any] = {"samples": samples, "runs": {}}
    for task in PACKAGED:
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
    report |= facts(engine)
    if as_json:
        console.json(report)
    else:
        console.note(roofline_note(report["roofline"]))
    if not all(run["identical"] for runs in report["runs"].values() for run in runs):
        raise typer.Exit(1)


def show_samples(samples: list[dict[str, Any]]) -> None:
    """Print prompts and their answers."""
    for sample in samples:
        console.result(f"\n> {sample['prompt']}\n{sample['text']}")

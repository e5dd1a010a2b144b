"""``vivace bench``: measure decoding speed, compare it with what the machine allows, and check the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Limit, Prompts, questions_of, read_prompts, split_names
from vivace.cli.reference import compare_plain, complain, plain_json, plain_lines
from vivace.cli.systems import drafting, holdings, libraries_memory, method_of, planned_engines
from vivace.errors import ConfigError, DependencyError
from vivace.files import write_text
from vivace.methods.table import METHODS
from vivace.prompts import PACKAGED, Prompt
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import Record, Run
    from vivace.evaluate.memory import Holdings
    from vivace.evaluate.reference import Plainness
    from vivace.evaluate.roofline import Roofline

app = typer.Typer(no_args_is_help=True, help="How fast, and whether the answers stayed the same.")

BASELINE = "plain"
"""Method that all others are compared with."""


@app.command("decode")
@options.grouped
def decode(
    *,
    model: options.Model = None,
    methods: Annotated[
        str, typer.Option(help="Decoding methods, with commas; plain is the baseline.")
    ] = "plain,lookup",
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines: transformers, transformers-lookup, transformers-assisted, llama.cpp, "
            "llama.cpp-q8_0, llama.cpp-q4_0."
        ),
    ] = "",
    prompts: Prompts = "e2e",
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=2)] = 64,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Times every prompt is answered by every method.", min=1)] = 3,
    load: options.LoadFlags,
    store: options.StoreFlags,
    raw: options.Raw = False,
    plans: Annotated[
        Path | None,
        typer.Option(help='Drafts by method, as JSON, instead of what adapters say: {"draft": {"widths": [1, 1]}}.'),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results there; - prints them.", metavar="OUT")
    ] = None,
) -> None:
    """Measure decoding speed: the methods take turns on every prompt, and medians over the repeats are reported."""
    from vivace.evaluate.benchmark import run_benchmark, summarise
    from vivace.evaluate.others import watched_others
    from vivace.evaluate.peers import peer_systems
    from vivace.evaluate.systems import MethodSystem

    libraries = libraries_memory()
    names = split_names(methods)
    if BASELINE not in names:
        raise ConfigError(f"--methods {methods!r}: {BASELINE} is the baseline of every figure; add it")
    rows = read_prompts(prompts, limit)
    rivals_draft = "transformers-assisted" in split_names(peers)
    engine = open_engine(model, [*map(method_of, names), *(["draft"] if rivals_draft else [])], load, store)
    if engine.storage is not None and split_names(peers):
        raise ConfigError(
            f"--peers read checkpoints, {engine.folder} is a store; leave them out, or name the checkpoint"
        )
    questions = questions_of(engine, rows, raw=raw)
    rivals, heat = peer_systems(
        split_names(peers),
        engine.folder,
        questions,
        max_new_tokens=max_new_tokens,
        device=engine.model.device,
        batch_size=batch,
        draft_folder=load.draft_model,
    )
    engines = planned_engines(engine, names, plans)
    systems = [MethodSystem(name, engines[name], max_new_tokens, raw) for name in names]
    with console.progress("answering") as progress, watched_others() as others:
        records = run_benchmark([*systems, *rivals], questions, batch_size=batch, repeats=repeats, on_progress=progress)
    runs = summarise(records, BASELINE)
    first = questions[:batch]
    held = {system.name: holdings(engines[system.name], system, first) for system in systems}
    held |= {peer.name: peer.holdings(first) for peer in rivals}
    answers = [ids for trials in records[names.index(BASELINE)].trials for ids in trials[0].token_ids]
    what, plain = compare_plain(engine, questions, answers)
    runs = [_beside(run, plain) if run.method == BASELINE else run for run in runs]
    report = {
        **facts(engine),
        "setting": {
            "model": engine.folder.name,
            "prompts": prompts if prompts in PACKAGED else Path(prompts).name,
            "num_prompts": len(rows),
            "max_new_tokens": max_new_tokens,
            "batch_size": batch,
            "repeats": repeats,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "kernels": engine.kernels.name,
            "weights": engine.weights,
            "others_cpu_share": others.cpu_share,
        },
        "storage": None if engine.storage is None else engine.storage.facts,
        "peers": None if heat is None else asdict(heat),
        "plain": plain_json(what, plain),
        "quality": quality(engine, rows, records, BASELINE),
        "lossy": {
            name: quality(engine, rows, records, name) for name in names if not METHODS[method_of(name)].lossless
        },
        "memory": {"libraries": libraries, "held": {name: asdict(found) for name, found in held.items()}},
        "runs": [asdict(run) | drafting(engines.get(run.method), run.method) for run in runs],
    }
    write_report(report, json_file)
    if str(json_file) != "-":
        print_runs(runs, held)
        for run in runs:
            if run.method in report["lossy"]:
                console.note(lossy_note(run, len(rows), report))
        for line in plain_lines(what, plain):
            console.note(line)
        console.note(roofline_note(report["roofline"]))
        if others.cpu_share is not None:
            console.note(f"other processes used {others.cpu_share:.1%} of the cores' time meanwhile")
    if complain(plain):
        raise typer.Exit(1)


def _beside(run: Run, plain: Plainness) -> Run:
    """Count as different the larger number: answers that vary between repeats, or that differ from the reference."""
    different = max(run.num_different, plain.num_different)
    return replace(run, identical=different == 0, num_different=different)


def facts(engine: Engine) -> dict[str, Any]:
    """Return the provenance of the figures and the measured roofline of the machine."""
    from vivace.evaluate.provenance import provenance
    from vivace.evaluate.roofline import measure_roofline

    roofline: Roofline = measure_roofline(engine.model)
    if engine.storage is not None:  # the weights that every pass reads from disk count as well
        streamed = engine.storage.plan.pass_bytes(engine.storage.store)
        roofline = replace(roofline, weight_bytes=roofline.weight_bytes + streamed)
    measured = {**asdict(roofline), "achieved_bytes_per_s": roofline.achieved_bytes_per_s}
    return {"provenance": asdict(provenance(engine.model.device)), "roofline": measured}


def lossy_note(run: Run, num_prompts: int, report: dict[str, Any]) -> str:
    """Return one line on a lossy method: share of early exits, identical answers, and quality beside the baseline's."""
    ours, base = report["lossy"][run.method] or {}, report["quality"] or {}
    pairs = [(f"{task} {name}", value, base[task][name]) for task in ours for name, value in ours[task].items()]
    told = [f"{name} {value:.4g} (plain {other:.4g})" for name, value, other in pairs if not name.endswith("num_texts")]
    exits = f"{run.early_exit_share or 0:.1%} of the tokens left early, {run.mean_exit_layer or 0:.1f} layers a token"
    same = f"{num_prompts - run.num_different} of {num_prompts} answers are plain's"
    return f"{run.method}: {exits}; {'; '.join([same, *told])}"


def quality(engine: Engine, prompts: list[Prompt], records: list[Record], name: str) -> dict[str, Any] | None:
    """Return the quality of a method's answers; None, with a note on stderr, if a package for it is missing."""
    from vivace.evaluate.quality import score

    found = next(record for record in records if record.name == name)
    texts = [engine.tokenizer.decode(ids) for trials in found.trials for ids in trials[0].token_ids]
    try:
        return score(prompts, texts)
    except DependencyError as error:
        console.note(f"no quality figures: {error}")
        return None


def write_report(report: dict[str, Any], target: Path | None) -> None:
    """Write results to a file, or print them if the target is ``-``."""
    if target is None:
        return
    if str(target) == "-":
        console.json(report)
        return
    write_text(target, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    console.note(f"results written to {target}")


def print_runs(runs: Sequence[Run], held: Mapping[str, Holdings] | None = None) -> None:
    """Print the table of results, with the memory that each method holds if it was measured."""
    columns = ["method", "tokens/s", "speed-up", "whole answers", "identical", "accept. length", "tokens/pass"]
    columns += [] if held is None else ["weights", "cache", "drafter"]
    rows = [
        [
            run.method,
            f"{run.tokens_per_s:.1f}",
            f"{run.speedup:.2f}x",
            f"{run.end_to_end_tokens_per_s:.1f}, {run.end_to_end_speedup:.2f}x",
            "yes" if run.identical else f"no ({run.num_different} differ)",
            _figure(run.mean_acceptance_length),
            _figure(run.tokens_per_target_pass),
            *([] if held is None else [format_bytes(size) for size in astuple(held[run.method])]),
        ]
        for run in runs
    ]
    console.table("", columns, rows)
    console.note(
        "accept. length = 1 + accepted / steps; tokens/s without the first block; whole answers with the prompt"
        + ("" if held is None else "; memory is that of tensors, libraries come on top")
    )


def roofline_note(roofline: dict[str, Any]) -> str:
    """Return one line on the measured memory bandwidth and the cost of verifying several tokens at once."""
    cost = roofline["verify_cost"]
    return (
        f"reads {roofline['achieved_bytes_per_s'] / 1e9:.1f} GB/s of weights in a one-row pass; this machine reads "
        f"{roofline['read_bytes_per_s'] / 1e9:.1f} GB/s; verify(k)/decode(1): "
        + ", ".join(f"k={k} {cost[k - 1]:.2f}" for k in (2, 4, 8, 16))
    )


def _figure(value: float | None) -> str:
    """Format a number with two decimals; "-" if there is none."""
    return "-" if value is None else f"{value:.2f}"

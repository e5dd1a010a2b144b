"""``vivace bench``: measure decoding speed, compare it with what the machine allows, and check the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
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
    from vivace.evaluate.benchmark import BenchmarkPrompt, Record, Run
    from vivace.evaluate.memory import Holdings
    from vivace.evaluate.peers import Heat, Peer
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
            help="Other engines, with commas: transformers, transformers-lookup, transformers-assisted, llama.cpp, "
            "llama.cpp-q8_0, llama.cpp-q4_0, llama.cpp-q4_k_m, llama.cpp-q3_k_s, llama.cpp-q2_k, "
            "llama.cpp-lookup."
        ),
    ] = "",
    prompts: Prompts = "e2e",
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=2)] = 64,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Times every prompt is answered by every method.", min=1)] = 3,
    load: options.LoadFlags,
    store: options.StoreFlags,
    ranks: options.ParallelFlags,
    raw: options.Raw = False,
    plans: Annotated[
        Path | None,
        typer.Option(help='Drafts by method, as JSON, instead of what adapters say: {"draft": {"widths": [1, 1]}}.'),
    ] = None,
    json_file: options.ReportFile = None,
) -> None:
    """Measure decoding speed: the methods take turns on every prompt, and medians over the repeats are reported."""
    libraries = libraries_memory()
    names, others = _with_baseline(methods), split_names(peers)
    rows = read_prompts(prompts, limit)
    setting = BenchmarkSetting(
        prompts if prompts in PACKAGED else Path(prompts).name, max_new_tokens, batch, repeats, raw
    )
    drafts_for_peers = ["draft"] if "transformers-assisted" in others else []
    engine = open_engine(model, [*map(method_of, names), *drafts_for_peers], load, store, ranks=ranks)
    questions = questions_of(engine, rows, raw=raw)
    opened, heat = _open_peers(others, engine, questions, setting, load.draft_model)
    engines = planned_engines(engine, names, plans)
    measured = measure(engine, engines, opened, questions, setting)
    report = {
        **facts(engine),
        "setting": setting_json(engine, setting, len(rows), measured.others_cpu_share),
        "storage": None if engine.storage is None else engine.storage.facts,
        "peers": None if heat is None else asdict(heat),
        "plain": plain_json(measured.reference, measured.plain),
        **quality_json(engine, rows, measured.records, names),
        "memory": {"libraries": libraries, "held": {name: asdict(found) for name, found in measured.held.items()}},
        "runs": [asdict(run) | drafting(engines.get(run.method), run.method) for run in measured.runs],
    }
    write_report(report, json_file)
    if str(json_file) != "-":
        print_measured(measured, len(rows), report)
    if complain(measured.plain):
        raise typer.Exit(1)


@dataclass(frozen=True)
class BenchmarkSetting:
    """What every system is asked to do."""

    prompts: str
    """Name of the prompts."""
    max_new_tokens: int
    batch: int
    """Number of prompts decoded together."""
    repeats: int
    raw: bool
    """Whether prompts are used without the chat template."""


@dataclass(frozen=True)
class BenchmarkResult:
    """What a benchmark found, before it is reported."""

    records: list[Record]
    runs: list[Run]
    """Figures of each system, in the order of the records."""
    held: dict[str, Holdings]
    """By system: the memory it holds."""
    reference: str
    """With what plain decoding was compared."""
    plain: Plainness
    """Result of that comparison."""
    others_cpu_share: float | None
    """Share of the cores' time that other processes used meanwhile; None where it cannot be read."""


def _with_baseline(methods: str) -> list[str]:
    """Return the methods named, with commas; plain decoding has to be among them."""
    names = split_names(methods)
    if BASELINE not in names:
        raise ConfigError(f"--methods {methods!r}: {BASELINE} is the baseline of every figure; add it")
    return names


def _open_peers(
    names: Sequence[str],
    engine: Engine,
    questions: Sequence[BenchmarkPrompt],
    setting: BenchmarkSetting,
    draft_folder: Path | None,
) -> tuple[list[Peer], Heat | None]:
    """Load other engines with the checkpoint of ``engine``; they cannot read a store."""
    from vivace.evaluate.peers import peer_systems

    if engine.storage is not None and names:
        raise ConfigError(
            f"--peers read checkpoints, {engine.folder} is a store; leave them out, or name the checkpoint"
        )
    return peer_systems(
        names,
        engine.folder,
        questions,
        max_new_tokens=setting.max_new_tokens,
        device=engine.model.device,
        batch_size=setting.batch,
        draft_folder=draft_folder,
    )


def measure(
    engine: Engine,
    engines: Mapping[str, Engine],
    peers: Sequence[Peer],
    questions: Sequence[BenchmarkPrompt],
    setting: BenchmarkSetting,
) -> BenchmarkResult:
    """Let methods and peers answer all prompts in turns, and compare plain decoding's answers with the checkpoint.

    Args:
        engine: opened on the checkpoint.
        engines: by method, the engine with that method's plan; plain decoding is among them.
        peers: other engines.
        questions: the prompts.
        setting: how often, in which batches and how long they answer.
    """
    from vivace.evaluate.benchmark import run_benchmark, summarise
    from vivace.evaluate.others import watched_others
    from vivace.evaluate.systems import MethodSystem

    systems = [MethodSystem(name, own, setting.max_new_tokens, setting.raw) for name, own in engines.items()]
    with console.progress("answering") as progress, watched_others() as others:
        records = run_benchmark(
            [*systems, *peers], questions, batch_size=setting.batch, repeats=setting.repeats, on_progress=progress
        )
    runs, first = summarise(records, BASELINE), questions[: setting.batch]
    held = {system.name: holdings(engines[system.name], system, first) for system in systems}
    held |= {peer.name: peer.holdings(first) for peer in peers}
    baseline = next(record for record in records if record.name == BASELINE)
    what, plain = compare_plain(engine, questions, [ids for trials in baseline.trials for ids in trials[0].token_ids])
    runs = [_beside(run, plain) if run.method == BASELINE else run for run in runs]
    return BenchmarkResult(records, runs, held, what, plain, others.cpu_share)


def setting_json(
    engine: Engine, setting: BenchmarkSetting, num_prompts: int, others_cpu_share: float | None
) -> dict[str, Any]:
    """Return what was asked of the systems, and of which model, for the file of results."""
    from vivace.checkpoint.files import named_file

    return {
        "model": Path(named_file(engine.folder)).name,
        "prompts": setting.prompts,
        "num_prompts": num_prompts,
        "max_new_tokens": setting.max_new_tokens,
        "batch_size": setting.batch,
        "repeats": setting.repeats,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kernels": engine.kernels.name,
        "weights": engine.weights,
        "others_cpu_share": others_cpu_share,
    }


def quality_json(engine: Engine, rows: list[Prompt], records: list[Record], names: Sequence[str]) -> dict[str, Any]:
    """Return the quality of the baseline's answers, and of those of lossy methods."""
    lossy = [name for name in names if not METHODS[method_of(name)].lossless]
    return {
        "quality": quality(engine, rows, records, BASELINE),
        "lossy": {name: quality(engine, rows, records, name) for name in lossy},
    }


def print_measured(measured: BenchmarkResult, num_prompts: int, report: dict[str, Any]) -> None:
    """Print the table of results, and notes on lossy methods, plain decoding, the roofline and other processes."""
    print_runs(measured.runs, measured.held)
    for run in measured.runs:
        if run.method in report["lossy"]:
            console.note(lossy_note(run, num_prompts, report))
    for line in plain_lines(measured.reference, measured.plain):
        console.note(line)
    console.note(roofline_note(report["roofline"]))
    if measured.others_cpu_share is not None:
        console.note(f"other processes used {measured.others_cpu_share:.1%} of the cores' time meanwhile")


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
    figures = [
        f"{name} {value:.4g} (plain {other:.4g})" for name, value, other in pairs if not name.endswith("num_texts")
    ]
    exits = f"{run.early_exit_share or 0:.1%} of the tokens left early, {run.mean_exit_layer or 0:.1f} layers a token"
    same = f"{num_prompts - run.num_different} of {num_prompts} answers are plain's"
    return f"{run.method}: {exits}; {'; '.join([same, *figures])}"


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
    columns = [
        "method",
        "tokens/s",
        "speed-up",
        "first token",
        "whole answers",
        "identical",
        "accept. length",
        "tokens/pass",
    ]
    columns += [] if held is None else ["weights", "cache", "drafter"]
    rows = [
        [
            run.method,
            f"{run.tokens_per_s:.1f}",
            f"{run.speedup:.2f}x",
            "-" if run.first_token_ms is None else f"{run.first_token_ms:.1f} ms",
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

"""Measure each part of speculative streams: ``python -m benchmarks.streams --data FILE --prompts FILE --out DIR``.

Short variants of one recipe, with one change each, are trained on the same rows for the same number of steps. All of
them decode the same prompts in turns with plain decoding; then the first one decodes with drafts of other depths and
widths, with and without pruning. Writes ``streams.json`` and a table, and plots speed against width (``widths.svg``).
Trained weights are kept in ``DIR/<variant>``; the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from benchmarks.plots import COLOURS
from benchmarks.result_files import write_report
from benchmarks.rivals import require_steps
from vivace.checkpoint.adapters import load_adapter
from vivace.cli.app import run
from vivace.cli.prompting import questions_of, read_prompts
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.tuning import planned

COMMON = ("adapter.streams=3", "adapter.insertion_layer=12", "adapter.feedback=true", "plan.attach=kept")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "all parts": (),
    "insertion 6": ("adapter.insertion_layer=6",),
    "insertion 18": ("adapter.insertion_layer=18",),
    "no feedback": ("adapter.feedback=false",),
    "no low-rank terms": ("adapter.rank=0",),
    "no bottleneck": ("adapter.bottleneck=0",),
    "embeddings alone": ("adapter.rank=0", "adapter.bottleneck=0", "adapter.feedback=false"),
    "values rotated, no embeddings": ("adapter.identifier=rotation",),
    "tokens, no law": ("loss.hard=1.0",),
}
"""Changes of the recipe in each variant."""
WIDTHS = (1, 2, 3, 4, 6)
"""Numbers of tokens of the first stream that are drafted, each with one continuation."""


def train(given: argparse.Namespace) -> dict[str, Path]:
    """Train the variants that are missing; return the folders of all."""
    folders = {}
    for name in given.only or VARIANTS:
        folders[name] = given.out / name.replace(",", "").replace(" ", "-")
        if (folders[name] / "config.json").is_file():
            continue
        words = [
            "train",
            "multistream",
            "--out",
            str(folders[name]),
            *(["--model", given.model] if given.model else []),
        ]
        words += [word for path in given.data for word in ("--data", str(path))]
        words += [*COMMON, "loop.minutes=null", f"loop.steps={given.steps}", "loop.warmup_steps=10", *VARIANTS[name]]
        if run(words) != 0:
            raise SystemExit(f"training {name} failed")
    return folders


def measure(given: argparse.Namespace, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Measure all variants with their own plans, then the first one with other drafts."""
    require_steps(folders.values(), given.steps)
    engines = {name: vivace.load(given.model, adapters={"multistream": path}) for name, path in folders.items()}
    first, config = next(iter(engines.values())), MultistreamConfig(**_written(next(iter(folders.values()))))
    asked = questions_of(first, read_prompts(given.prompts, given.limit), raw=False)
    shape = first.model.config
    drafts = {plan.label: planned(first, plan) for plan in plans(config, given.threshold)}
    return {
        "provenance": asdict(provenance(first.model.device)),
        "kernels": first.kernels.name,
        "prompts": given.prompts,
        "num_prompts": len(asked),
        "steps": given.steps,
        "paper_weights": config.num_paper_parameters(shape.width),
        "medusa_weights": config.num_medusa_parameters(shape.width, shape.vocab_size),
        "weights": {name: sum(t.numel() for t in load_adapter(path)[1].values()) for name, path in folders.items()},
        "variants": compare(engines, asked, given.repeats),
        "drafts": compare(drafts, asked, given.repeats),
        "widths": [[plan.label for plan in row] for row in (widths(config, 0.0), widths(config, given.threshold))],
    }


def _written(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter."""
    config: dict[str, Any] = load_adapter(folder)[0]["config"]
    return config


def plans(config: MultistreamConfig, threshold: float) -> list[StreamPlan]:
    """Return chains of every depth, then every width without and with pruning."""
    chains = [StreamPlan((1,) * depth, "kept") for depth in range(1, config.streams + 1)]
    return list(dict.fromkeys([*chains, *widths(config, 0.0), *widths(config, threshold)]))


def widths(config: MultistreamConfig, threshold: float) -> list[StreamPlan]:
    """Return trees of growing width at the first stream, with one branch below each token."""
    below = (1,) * (config.streams - 1)
    return [StreamPlan((width, *below), "kept", threshold) for width in WIDTHS]


def compare(engines: Mapping[str, Engine], asked: Sequence[BenchmarkPrompt], repeats: int) -> list[dict[str, Any]]:
    """Measure plain decoding and each of these engines, in turns."""
    first = next(iter(engines.values()))
    players = [Named(name, MethodSystem("multistream", engine, 64)) for name, engine in engines.items()]
    records = run_benchmark([Named("plain", MethodSystem("plain", first, 64)), *players], asked, repeats=repeats)
    return [asdict(row) for row in summarise(records, "plain")]


def table(report: Mapping[str, Any]) -> str:
    """Return variants and drafts as Markdown tables."""
    titles = {"variants": "variant", "drafts": "draft of the first"}
    parts = [_rows(title, report[key][1:], report["weights"]) for key, title in titles.items()]
    own, heads = report["paper_weights"], report["medusa_weights"]
    note = (
        f"Embeddings and pruner, gamma E + 2 r E: {own:,} weights; as many heads of Medusa as there are streams, "
        f"gamma (E^2 + E V): {heads:,}, {heads / own:.0f} times as many."
    )
    return "\n\n".join([*parts, note])


def _rows(title: str, runs: Sequence[Mapping[str, Any]], weights: Mapping[str, int]) -> str:
    """Return the table of some runs."""
    lines = [
        f"| {title} | weights | tokens a pass | kept by position | speed-up | text |",
        "|---|---:|---:|---|---:|---|",
    ]
    for row in runs:
        low, high = row["speedup_interval"]
        size = f"{weights[row['method']]:,}" if row["method"] in weights else ""
        kept = ", ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
        same = "same" if row["identical"] else "differs"
        lines.append(
            f"| {row['method']} | {size} | {row['tokens_per_target_pass']:.2f} | {kept} | "
            f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f}) | {same} |"
        )
    return "\n".join(lines)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Plot the speed-up against width, without and with pruning; the same report gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    speed = {row["method"]: row["speedup"] for row in report["drafts"]}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="vivace", fonttype="none")
        matplotlib.rc("font", family="sans-serif", size=10)
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axis = figure.add_subplot()
        axis.spines[["top", "right"]].set_visible(False)
        for names, label, colour in zip(report["widths"], ("whole tree", "pruned"), COLOURS, strict=False):
            axis.plot(WIDTHS, [speed[name] for name in names], marker="o", color=colour, label=label)
        axis.set(xlabel="tokens of the first stream that are tried", ylabel="speed beside plain")
        axis.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    """Train, measure and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, action="append", required=True, help="rows with the model's own answers")
    parser.add_argument("--prompts", required=True, help="prompts that nothing was trained on")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="of training, each variant")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=0.02, help="of the drafts with pruning")
    parser.add_argument(
        "--only", nargs="*", choices=list(VARIANTS), help="variants; the first one's drafts are measured"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    report = measure(given, train(given))
    write_report(given.out / "streams.json", report)
    (given.out / "streams.md").write_text(table(report) + "\n", encoding="utf-8")
    draw(report, given.out / "widths.svg")
    print(table(report))


if __name__ == "__main__":
    main()

"""Tables and plots from committed results: ``python -m benchmarks.report`` (``--check`` only looks).

A result is what ``vivace bench decode --json benchmarks/results/NAME.json`` wrote. The files are read in the order of
their names and go into the README (one table, two plots), ``docs/results.md`` (everything else that was measured) and
``docs/techniques/multirate.md``. Those of ``benchmarks.kernels`` and ``benchmarks.peers`` are in
``benchmarks/results/passes`` and end ``docs/results.md``. Those of ``benchmarks.rivals`` are in
``benchmarks/results/rivals`` and go into ``docs/techniques/rivals.md``. The same files give the same text and, with
the same matplotlib, the same pictures.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    checksums,
    expert_tables,
    flash_tables,
    pass_tables,
    plots,
    rivals_table,
    speed_law,
    stream_tables,
    tradeoff,
)
from tools.blocks import fill_file, settle, table
from vivace.evaluate.speed_law import Shape, head_share

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RIVALS = RESULTS / "rivals"
"""What ``benchmarks.rivals measure`` wrote."""
IMAGES = ROOT / "docs" / "images"
PARTS = ("provenance", "roofline", "setting", "runs")
NONE_YET = "No results are committed yet."
OURS = ("lookup", "multirate", "multirate+lookup", "multistream", "auto")
"""Columns of the README's table come in this order, and then the others."""


@dataclass(frozen=True)
class Result:
    """One file of ``vivace bench decode``."""

    name: str
    provenance: dict[str, Any]
    roofline: dict[str, Any]
    setting: dict[str, Any]
    runs: list[dict[str, Any]]
    quality: dict[str, dict[str, float]] | None = None
    peers: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """Model, prompts and kernels."""
        return f"{self.setting['model']}, {self.prompt_set}, {self.setting['kernels']}"

    @property
    def prompt_set(self) -> str:
        """File of prompts without its ending, and how many of them where its name says another number."""
        name, count = str(self.setting["prompts"]).removesuffix(".jsonl"), self.setting["num_prompts"]
        says = name.rpartition("-")[2]
        return f"{name}, the first {count}" if says.isdigit() and int(says) != count else name

    @property
    def is_twin(self) -> bool:
        """Made by ``vivace widen``."""
        return re.search(r"-x\d+$", self.setting["model"]) is not None


def read_results(folder: Path) -> list[Result]:
    """Every result in a folder, by name.

    Raises:
        ValueError: a file is not a result; names the file and what is missing.
    """
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    missing = set(PARTS) - set(values)
    if missing or not values["runs"]:
        lacking = ", ".join(sorted(missing)) or "runs"
        raise ValueError(f"{path.name} is not a result of `vivace bench decode`: no {lacking}")
    return Result(
        path.stem, **{part: values[part] for part in PARTS}, quality=values.get("quality"), peers=values.get("peers")
    )


def summary(results: Sequence[Result]) -> str:
    """What the README shows: a lead, and a row of speeds beside plain decoding for each model and prompt set."""
    if not results:
        return NONE_YET
    names = list(dict.fromkeys(run["method"] for result in results for run in result.runs if run["method"] != "plain"))
    names.sort(key=[*OURS, *names].index)
    header = ("model", "prompts", "kernels", "`plain`", *(f"`{name}`" for name in names), "tokens a pass")
    pictures = (("acceptance by position", plots.ACCEPTANCE), ("time per token", plots.TIME))
    rows = [_speeds(result, names) for result in results]
    return "\n\n".join(
        [*_lead(results), table(header, rows), *(f"![{text}](docs/images/{name})" for text, name in pictures)]
    )


def _lead(results: Sequence[Result]) -> list[str]:
    """The headline: drafting on the wide twins, where memory binds as it does for models that fit no cache."""
    wide = [result for result in results if result.is_twin and result.setting["kernels"] != "torch"]
    parts = [
        f"{run['speedup']:.2f}x on {result.prompt_set} ({_figure(run['tokens_per_target_pass'])} tokens a pass)"
        for result in wide
        for run in result.runs
        if run["method"] == "multirate" and run["identical"]
    ]
    if not parts:
        return []
    twin = f"{wide[0].setting['model']} ({wide[0].roofline['weight_bytes'] / 1e6:.0f} MB of weights a pass)"
    return [f"`multirate` beside plain decoding on the wide twin {twin}: **{', '.join(parts)}**, the same text."]


def _speeds(result: Result, names: Sequence[str]) -> tuple[str, ...]:
    runs = {run["method"]: run for run in result.runs}
    ratios = [f"{_ratio(runs[name])}" if name in runs else "-" for name in names]
    kept = _figure(runs["multirate"]["tokens_per_target_pass"]) if "multirate" in runs else "-"
    s, plain = result.setting, f"{runs['plain']['tokens_per_s']:.0f} tok/s"
    return (s["model"], result.prompt_set, s["kernels"], plain, *ratios, kept)


def _ratio(run: dict[str, Any]) -> str:
    return f"{run['speedup']:.2f}x{'' if run['identical'] else '*'}"


def details(results: Sequence[Result]) -> str:
    """Everything else: setting, machine, roofline, quality, memory, end-to-end rate."""
    if not results:
        return NONE_YET
    return "\n\n".join(_details(result) for result in results)


def _details(result: Result) -> str:
    s, p, r = result.setting, result.provenance, result.roofline
    versions = ", ".join(f"{name} {version}" for name, version in sorted(p["packages"].items()))
    cost = ", ".join(f"{k}: {r['verify_cost'][k - 1]:.2f}" for k in (1, 2, 4, 8, 16) if k <= len(r["verify_cost"]))
    lines = [
        f"## {result.title}",
        "",
        f"{s['num_prompts']} prompts, at most {s['max_new_tokens']} new tokens, batch {s['batch_size']}, "
        f"{s['repeats']} repeats, {s['dtype']}, kernels {s['kernels']}. File: `benchmarks/results/{result.name}.json`.",
        "",
        f"- machine: {p['cpu']}, {p['num_threads']} threads of {p['num_cores']} cores, device {p['device']}",
        f"- versions: python {p['python']}, {versions}; commit {p['commit'] or 'unknown'}",
        f"- roofline: a one-row pass reads {r['achieved_bytes_per_s'] / 1e9:.1f} GB/s of weights "
        f"({r['weight_bytes'] / 1e6:.1f} MB a pass); the machine reads {r['read_bytes_per_s'] / 1e9:.1f} GB/s",
        f"- a pass over k rows, in one-row passes: {cost}",
        *([f"- transformers runs in {result.peers['dtype']}, its fastest dtype here"] if result.peers else []),
        *_quality(result),
        "",
        _detail_table(result),
    ]
    return "\n".join(lines)


def _quality(result: Result) -> list[str]:
    """A line per task; shares are between 0 and 1, BLEU and ROUGE-L between 0 and 100."""
    return [
        f"- quality of the plain answers, {task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        for task, values in (result.quality or {}).items()
    ]


def _detail_table(result: Result) -> str:
    rows = [
        (
            f"`{run['method']}`",
            f"{run['tokens_per_s']:.1f}",
            f"{run['tokens_per_s_spread'][0]:.1f} to {run['tokens_per_s_spread'][1]:.1f}",
            _interval(run),
            f"{run['end_to_end_tokens_per_s']:.1f}",
            _figure(run["mean_acceptance_length"]),
            _positions(run),
            "-" if run["peak_memory_bytes"] is None else f"{run['peak_memory_bytes'] / 2**20:.0f} MiB",
            _identical(run),
        )
        for run in result.runs
    ]
    speeds = ("tokens/s", "lowest to highest", "beside plain", "end to end")
    return table(("method", *speeds, "acceptance length", "by position", "memory", "same"), rows)


def technique(results: Sequence[Result], method: str) -> str:
    """What was measured of one method and of those built on it."""
    rows = []
    for result in results:
        for run in result.runs:
            if run["method"].split("+")[0] == method:
                kept, same = _figure(run["tokens_per_target_pass"]), _identical(run)
                rows.append((result.title, f"`{run['method']}`", _positions(run), kept, _interval(run), same))
    if not rows:
        return NONE_YET
    measures = ("acceptance by position", "tokens per target pass", "beside plain", "identical")
    header = ("model, prompts, kernels", "method", *measures)
    return table(header, rows)


def law(results: Sequence[Result]) -> str:
    """The speed law beside measured speeds, and what it says of a large model at the acceptance measured here."""
    paths = sorted((RESULTS / "law").glob("*.json"))
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    parts = [speed_law.table({"rows": rows})] if rows else []
    shapes = [
        (f"V = {vocabulary // 1000}k{', q4' if read < 1 else ''}", Shape(4, 32, share, 0.05, read, head_read))
        for vocabulary in (4000, 32000, 128000)
        for share in (head_share(2048, 5504, 32, vocabulary),)
        for read, head_read in ((1.0, 1.0), (0.3, 0.5))
    ]
    found = [
        (f"{result.setting['model']}, {result.prompt_set}", *(_best(shape, run) for _, shape in shapes))
        for result in results
        for run in result.runs
        if run["method"] == "multirate" and result.setting["kernels"] != "torch" and not result.is_twin
    ]
    return "\n\n".join([*parts, table(("acceptance of", *(name for name, _ in shapes)), found)] if found else parts)


def _best(shape: Shape, run: dict[str, Any]) -> str:
    guesses, gain = shape.best(run["acceptance_per_position"])
    return f"{gain:.2f}x ({guesses})"


def _positions(run: dict[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in run["acceptance_per_position"]) or "-"


def _interval(run: dict[str, Any]) -> str:
    low, high = run["speedup_interval"]
    return f"{run['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def _identical(run: dict[str, Any]) -> str:
    return "yes" if run["identical"] else f"no ({run['num_different']} differ)"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def wanted(results: Sequence[Result]) -> dict[Path, str]:
    """Every page this script has a say in, with the text it should have."""
    docs = ROOT / "docs"
    rivals = rivals_table.read_reports(RIVALS)
    parts = {
        ROOT / "README.md": {"results": summary(results)},
        docs / "results.md": {"results": details(results), "passes": pass_tables.tables(RESULTS / "passes")},
        docs / "techniques" / "rivals.md": {"results": rivals_table.tables(rivals)},
        docs / "techniques" / "multistream.md": {
            "results": stream_tables.beside_paper(rivals_table.titled_runs(rivals)),
            "shared mode": stream_tables.shared(RESULTS / "shared"),
            "weights": stream_tables.weights(),
        },
        docs / "techniques" / "dynamic_depth.md": {"trade-off": tradeoff.tables(RESULTS / "tradeoff")},
        docs / "techniques" / "flash.md": {
            "results": flash_tables.tables(RESULTS / "flash"),
            "checksums": checksums.tables(RESULTS / "checksums"),
        },
        docs / "techniques" / "experts.md": {
            "results": expert_tables.tables(RESULTS / "experts"),
            "sweep": expert_tables.sweep(RESULTS / "sweep" / "experts.json"),
        },
        docs / "techniques" / "multirate.md": {"law": law(results), "results": technique(results, "multirate")},
    }
    return {path: fill_file(path, blocks) for path, blocks in parts.items()}


def main(args: list[str]) -> int:
    """Write, or with ``--check`` name what is out of date; returns the exit status."""
    check = "--check" in args
    try:
        results = read_results(RESULTS)
        stale = settle(wanted(results), check=check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: python -m benchmarks.report' if check else 'written'}")
    if results and not check:
        for path in plots.draw([(result.title, result.runs) for result in results], IMAGES):
            print(f"{path.relative_to(ROOT)} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

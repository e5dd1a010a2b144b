"""How many prompt tokens are ever computed: ``python -m benchmarks.prefill_growth MODEL SOURCE --json FILE``.

Questions about one of many documents are answered while pruned tokens may come back (``decode_keep`` same). After every
step the counters of the engine say which share of the prompt has passed the layers behind each pruning point. The plot
has a curve for each group of layers, as figure 5 of LazyLLM (arXiv:2407.14057) has for Llama 2; it is drawn by
``python -m benchmarks.prefill_growth --plot FILE SVG``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.exit_plots import _axes, _plain_settings, _save
from benchmarks.plots import COLOURS
from benchmarks.prefill_quality import half_of
from benchmarks.result_files import NO_RUN, write_report
from tools.blocks import table
from vivace.engine import Engine
from vivace.evaluate.long_prompts import LONG_TASKS, Layout
from vivace.evaluate.provenance import provenance

STEPS = 32
"""Tokens of an answer."""
PAPERS = (("Llama 2 7B (paper)", "64%"), ("XGen 7B (paper)", "70%"))
"""Share of prompt tokens computed on multi-document questions, table 2 of the paper."""


def measure(engine: Engine, source: Path, documents: int, count: int, keep: str) -> dict[str, Any]:
    """Return by pruning point the mean share of prompt tokens that are computed behind it after each step."""
    from random import Random

    rows, draws, layout = half_of(source, "B"), Random(7), Layout(documents=documents)
    shares: dict[int, list[list[float]]] = {}
    for number in range(count):
        prompt = engine.tokenizer.encode_prompt(LONG_TASKS["multidoc"](rows, number, layout, draws).request, raw=False)
        options: dict[str, Any] = {"method": "plain", "do_sample": False, "ignore_eos": True, "max_new_tokens": STEPS}
        way = {"prefill": "lazy", "keep": keep, "decode_keep": "same", "min_prompt": 1}
        [result] = engine.generate(list(prompt), **options, **way)
        for place, (layer, kept) in enumerate(result.stats.prompt_kept):
            back = accumulate((step[place] for step in result.stats.came_back), initial=kept)
            shares.setdefault(layer, []).append([each / len(prompt) for each in back])
        print(f"{number + 1}/{count}", flush=True)
    curves = {str(layer): [sum(at) / len(at) for at in zip(*own, strict=False)] for layer, own in shares.items()}
    return {"curves": curves, "num_layers": engine.model.config.num_layers}


def groups(found: Mapping[str, Any]) -> list[tuple[str, Sequence[float], int]]:
    """Return each group of layers: its name, its curve, and how many layers it has."""
    curves, num_layers = found["curves"], found["num_layers"]
    edges = [0, *map(int, curves), num_layers]
    steps = len(next(iter(curves.values())))
    lines: list[Sequence[float]] = [[1.0] * steps, *curves.values()]
    return [
        (f"layers {first + 1} to {stop}", line, stop - first)
        for first, stop, line in zip(edges, edges[1:], lines, strict=False)
    ]


def tables(path: Path) -> str:
    """Return the table of a run beside the paper's figure."""
    if not path.is_file():
        return NO_RUN
    written = json.loads(path.read_text(encoding="utf-8"))
    setting, found = written["setting"], groups(written["found"])
    rows = [(name, f"{line[0]:.0%}", f"{line[-1]:.0%}") for name, line, _ in found]
    total = sum(size for *_, size in found)
    ends = [sum(line[at] * size for _, line, size in found) / total for at in (0, -1)]
    rows.append(("all layers, mean", *(f"{share:.0%}" for share in ends)))
    rows += [(f"{name}, multi-document questions", "", share) for name, share in PAPERS]
    caption = (
        f"{captions.heading(written['provenance'], setting['kernels'])}; {setting['model']}, keep {setting['keep']}, "
        f"{setting['count']} questions with {setting['documents']} documents; the paper does not say over which layers "
        "its share is."
    )
    heads = ("layers", "prompt tokens computed when the answer begins", f"after {STEPS} tokens")
    return f"{caption}\n\n{table(heads, rows)}"


def draw(path: Path, out: Path) -> Path:
    """Plot a curve for each group of layers."""
    written = json.loads(path.read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with _plain_settings():
        figure, [axis] = _axes(1)
        for colour, (name, line, _) in zip(COLOURS, groups(written["found"]), strict=False):
            axis.plot(range(len(line)), [100 * share for share in line], color=colour, label=name)
        axis.set(xlabel="decoding step", ylabel="prompt tokens computed, %", ylim=(0, 105))
        axis.legend(frameon=False, fontsize=8)
        return _save(figure, out)


def main() -> None:
    """Measure, or plot what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--keep", default="balanced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("FILE", "SVG"))
    asked = parser.parse_args()
    if asked.plot:
        draw(*asked.plot)
        return
    if asked.source is None or asked.json is None:
        parser.error("measuring needs MODEL, SOURCE and --json")
    engine = vivace.load(asked.model)
    found = measure(engine, asked.source, asked.documents, asked.count, asked.keep)
    setting = {
        "model": Path(asked.model).name,
        "kernels": engine.kernels.name,
        **{name: getattr(asked, name) for name in ("documents", "count", "keep")},
    }
    written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "found": found}
    write_report(asked.json, written)


if __name__ == "__main__":
    main()

"""Quality of texts by beams beside greedy ones: ``python -m benchmarks.beam_quality MODEL ROWS --json OUT``.

BLEU is sacrebleu's with its 13a tokenisation against all references, with case (as everywhere here) and without, as the
scripts of the E2E challenge have it. Every search runs twice, with keys and values of the source (``shared``) and with
the encoder's states alone (``el``): in float32 they are the same texts, in bfloat16 the report says how many are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from benchmarks import captions
from benchmarks.result_files import write_report
from tools.blocks import table
from vivace.evaluate.overlap import bleu
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import score
from vivace.prompts import load_prompts

BEAMS = (1, 4)
ATTENTIONS = ("shared", "el")
METRICS = {"bleu": "BLEU", "bleu_lower": "BLEU, lower case", "rouge_l": "ROUGE-L", "slot_error_rate": "slot errors"}


def measure(model: str, rows: Path, most: int) -> dict[str, Any]:
    """Answer all rows greedily and by beams with each kind of attention, and score the texts."""
    prompts = load_prompts(rows)
    asked = [prompt.request for prompt in prompts]
    references = [[one.lower() for one in prompt.references] for prompt in prompts]
    runs: list[dict[str, Any]] = []
    first: dict[int, list[str]] = {}
    for attention in ATTENTIONS:
        engine = vivace.load(model, attention=attention)
        for beams in BEAMS:
            results = engine.generate(asked, num_beams=beams, max_new_tokens=most, batch_size=32)
            texts = [result.text for result in results]
            values = next(iter(score(prompts, texts).values()))
            values["bleu_lower"] = bleu([text.lower() for text in texts], references)
            same = sum(map(str.__eq__, texts, first.setdefault(beams, texts)))
            runs.append({"attention": attention, "num_beams": beams, "num_same": same, **values})
    dtype = str(engine.model.dtype).removeprefix("torch.")
    setting = {"model": engine.folder.name, "prompts": rows.name, "num_prompts": len(prompts)}
    setting |= {"max_new_tokens": most, "kernels": engine.kernels.name, "dtype": dtype}
    return {"provenance": asdict(provenance(engine.model.device)), "setting": setting, "runs": runs}


def tables(path: Path) -> str:
    """Return a table of a result of this script."""
    if not path.is_file():
        return "No result is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    s = report["setting"]
    where = f"{captions.machine(report['provenance'], s['kernels'])}; `benchmarks/results/beams/{path.name}`"
    asked = f"{s['prompts'].removesuffix('.jsonl')}, {s['num_prompts']:,} prompts, {s['dtype']}; {where}."
    names = [name for name in METRICS if name in report["runs"][0]]
    rows = [(*_search(run, s["num_prompts"]), *(f"{run[name]:.4g}" for name in names)) for run in report["runs"]]
    return f"{asked}\n\n{table(('texts', 'as with keys and values', *(METRICS[name] for name in names)), rows)}"


def _search(run: dict[str, Any], count: int) -> tuple[str, str]:
    """Return how a run searched, and how many of its texts are those of the run with keys and values."""
    name = "greedy" if run["num_beams"] == 1 else f"{run['num_beams']} beams"
    if run["attention"] == "el":
        return f"{name}, `el`", f"{run['num_same']} of {count} ({run['num_same'] / count:.1%})"
    return name, ""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report = measure(given.model, given.rows, given.max_new_tokens)
    write_report(given.json, report)


if __name__ == "__main__":
    main()

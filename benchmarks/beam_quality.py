"""Quality of texts by beams beside greedy ones: ``python -m benchmarks.beam_quality MODEL ROWS --json OUT``.

BLEU is sacrebleu's with its 13a tokenisation against all references, with case (as everywhere here) and without, as the
scripts of the E2E challenge have it. Every search runs twice, with keys and values of the source (``shared``) and with
the encoder's states alone (``el``): in float32 they are the same texts, in bfloat16 the report says how many are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
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
SEARCH = ("no_repeat_ngram_size", "length_penalty", "min_new_tokens")
METRICS = {"bleu": "BLEU", "bleu_lower": "BLEU, lower case", "rouge_l": "ROUGE-L", "slot_error_rate": "slot errors"}


def measure(model: str, rows: Path, most: int, asked_for: Mapping[str, Any]) -> dict[str, Any]:
    """Answer all rows greedily and by beams with each kind of attention, and score the texts.

    Args:
        model: the checkpoint.
        rows: prompts with references.
        most: new tokens of a text.
        asked_for: further options of generation; those that only a search has are left out where texts are greedy.
    """
    prompts = load_prompts(rows)
    asked = [prompt.request for prompt in prompts]
    references = [[one.lower() for one in prompt.references] for prompt in prompts]
    runs: list[dict[str, Any]] = []
    first: dict[int, list[str]] = {}
    for attention in ATTENTIONS:
        engine = vivace.load(model, attention=attention)
        for beams in BEAMS:
            options = {name: value for name, value in asked_for.items() if beams > 1 or name != "length_penalty"}
            results = engine.generate(asked, num_beams=beams, max_new_tokens=most, batch_size=32, **options)
            texts = [result.text for result in results]
            values = next(iter(score(prompts, texts).values()))
            values["bleu_lower"] = bleu([text.lower() for text in texts], references)
            same = sum(map(str.__eq__, texts, first.setdefault(beams, texts)))
            runs.append({"attention": attention, "num_beams": beams, "num_same": same, **values})
    dtype = str(engine.model.dtype).removeprefix("torch.")
    setting = {"model": engine.folder.name, "prompts": rows.name, "num_prompts": len(prompts)}
    setting |= {"max_new_tokens": most, **asked_for, "kernels": engine.kernels.name, "dtype": dtype}
    return {"provenance": asdict(provenance(engine.model.device)), "setting": setting, "runs": runs}


def tables(path: Path) -> str:
    """Return a table of a result of this script."""
    if not path.is_file():
        return "No result is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    s = report["setting"]
    where = f"{captions.machine(report['provenance'], s['kernels'])}; `benchmarks/results/beams/{path.name}`"
    search = [f"`{name}` {s[name]:g}" for name in SEARCH if name in s]
    what = ", ".join([s["prompts"].removesuffix(".jsonl"), f"{s['num_prompts']:,} prompts", s["dtype"], *search])
    asked = f"{what}; {where}."
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
    parser.add_argument("--no-repeat-ngram-size", type=int)
    parser.add_argument("--length-penalty", type=float)
    parser.add_argument("--min-new-tokens", type=int)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    asked_for = {name: getattr(given, name) for name in SEARCH if getattr(given, name) is not None}
    report = measure(given.model, given.rows, given.max_new_tokens, asked_for)
    write_report(given.json, report)


if __name__ == "__main__":
    main()

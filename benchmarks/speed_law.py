"""Measured speed beside the speed law: ``python -m benchmarks.speed_law --model DIR [--model DIR] --json OUT``.

For each model and prompt set the parts of a step are timed alone, before and after a contest of plain decoding and
the method, and the law that they and the measured acceptance give is set beside the measured speed. Asked for: within
15 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from vivace.cli.asking import questions_of, read_prompts
from vivace.engine import Engine
from vivace.evaluate.contest import Question, hold, summarise
from vivace.evaluate.entrants import Entrant
from vivace.evaluate.provenance import provenance
from vivace.evaluate.speed_law import Parts, judge, measure_parts

FOLLOWS = 16
"""Tokens of the first answer that the text of the timed step has: a step in the middle of an answer."""


def compare(
    engine: Engine, method: str, questions: Sequence[Question], *, max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """The law and the measurement for one method on some prompts, greedily, one at a time."""
    drafter = engine.methods.drafter(method)
    first = engine.generate([questions[0].request], method="plain", max_new_tokens=FOLLOWS, do_sample=False)[0]
    text = [*questions[0].token_ids, *first.token_ids]
    plan = drafter.plan  # type: ignore[attr-defined]
    before = measure_parts(engine.model, drafter, text, longest=len(plan.widths))
    players = [Entrant(name, engine, max_new_tokens) for name in ("plain", method)]
    records = hold(players, questions, repeats=repeats)
    parts = mean(before, measure_parts(engine.model, drafter, text, longest=len(plan.widths)))
    run = summarise(records, "plain")[1]
    judged = judge(parts, records[1], records[0], run.speedup)
    return {**asdict(judged), "off": judged.off, "interval": run.speedup_interval, "identical": run.identical}


def mean(one: Parts, other: Parts) -> Parts:
    """Of two measurements."""
    pairs = (zip(one.draft_s, other.draft_s, strict=True), zip(one.verify_s, other.verify_s, strict=True))
    draft, verify = (tuple((a + b) / 2 for a, b in pair) for pair in pairs)
    return Parts((one.plain_s + other.plain_s) / 2, draft, verify)


def table(report: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        "| model, prompts, kernels | tokens a step | P | D(n) | V(n) | h | law | measured | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        parts = row["parts"]
        cells = [1e3 * seconds for seconds in (parts["plain_s"], parts["draft_s"][-1], parts["verify_s"][-1])]
        times = " | ".join(f"{value:.2f} ms" for value in (*cells, 1e3 * parts["host_s"]))
        lines.append(
            f"| {row['model']}, {row['prompts']}, {row['kernels']} | {row['tokens_per_step']:.2f} | {times} | "
            f"{row['law']:.2f}x | {row['measured']:.2f}x | {row['off']:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every model on every prompt set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="a checkpoint, repeatable; left out: the model that ships")
    parser.add_argument("--prompts", action="append", help="a .jsonl file or a packaged set, repeatable")
    parser.add_argument("--method", default="multirate")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {"rows": []}
    for model in given.model or [None]:
        engine = vivace.load(model)
        report["provenance"] = asdict(provenance(engine.model.device))
        for prompts in given.prompts or ["e2e", "sql"]:
            asked = questions_of(engine, read_prompts(prompts, given.limit), raw=False)
            found = compare(engine, given.method, asked, max_new_tokens=given.max_new_tokens, repeats=given.repeats)
            where = {"model": engine.folder.name, "prompts": Path(prompts).stem, "kernels": engine.kernels.name}
            report["rows"].append({**where, "num_prompts": len(asked), **found})
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()

"""Compare measured and predicted speed-ups: ``python -m benchmarks.speed_law --model DIR [--model DIR] --json OUT``.

For each model and prompt set the passes of a step and the time outside of passes are measured by themselves, before and
after a benchmark of plain decoding and the method. The speed-up predicted from them and from the measured acceptance
(``vivace.evaluate.speed_law``) should be within 15 % of the measured one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import vivace
from benchmarks.result_files import write_report
from benchmarks.step_parts import host_seconds, measure_parts
from vivace.cli.prompting import questions_of, read_prompts
from vivace.engine import Engine, Options
from vivace.evaluate.benchmark import BenchmarkPrompt, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.speed_law import StepCosts, judge
from vivace.evaluate.systems import MethodSystem

FOLLOWS = 16
"""Number of tokens of the first answer in the text of the timed step, so that it is a step in the middle of an
answer.
"""
WATCHED = 8
"""Number of answers in which the time outside of passes is measured."""


def compare(
    engine: Engine, method: str, questions: Sequence[BenchmarkPrompt], *, max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Return the predicted and the measured speed-up of one method on some prompts, decoded greedily one at a time."""
    before = measured_parts(engine, method, questions, max_new_tokens=max_new_tokens)
    players = [MethodSystem(name, engine, max_new_tokens) for name in ("plain", method)]
    records = run_benchmark(players, questions, repeats=repeats)
    parts = mean(before, measured_parts(engine, method, questions, max_new_tokens=max_new_tokens))
    run = summarise(records, "plain")[1]
    judged = judge(parts, records[1], run.speedup)
    return {**asdict(judged), "off": judged.off, "interval": run.speedup_interval, "identical": run.identical}


def measured_parts(
    engine: Engine, method: str, questions: Sequence[BenchmarkPrompt], *, max_new_tokens: int
) -> StepCosts:
    """Measure passes in the middle of the first answer, and the time outside of passes in the first few answers."""
    plain, drafter = engine.methods.drafter("plain"), engine.methods.drafter(method)
    first = engine.generate([questions[0].request], method="plain", max_new_tokens=FOLLOWS, do_sample=False)[0]
    text = [*questions[0].token_ids, *first.token_ids]
    plan = drafter.plan  # type: ignore[attr-defined]
    parts = measure_parts(engine.model, plain, drafter, text, longest=len(plan.widths))
    hosts = []
    for name in ("plain", method):
        options = Options.of({"method": name, "max_new_tokens": max_new_tokens, "do_sample": False})
        requests = [engine.request_for(question.token_ids, options) for question in questions[:WATCHED]]
        hosts.append(host_seconds(engine.model, requests))
    return replace(parts, plain_host_s=hosts[0], host_s=hosts[1])


def mean(one: StepCosts, other: StepCosts) -> StepCosts:
    """Return the mean of two measurements."""
    pairs = (zip(one.draft_s, other.draft_s, strict=True), zip(one.verify_s, other.verify_s, strict=True))
    draft, verify = (tuple((a + b) / 2 for a, b in pair) for pair in pairs)
    plain_host, host = (one.plain_host_s + other.plain_host_s) / 2, (one.host_s + other.host_s) / 2
    return StepCosts((one.plain_s + other.plain_s) / 2, draft, verify, plain_host, host)


def table(report: Mapping[str, Any]) -> str:
    """Return the report as a Markdown table."""
    lines = [
        "| model, prompts, kernels | tokens a step | P | h | D(n) | V(n) | g | law | measured | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        parts = row["parts"]
        alone = (parts["plain_s"], parts["plain_host_s"])
        drafted = (parts["draft_s"][-1], parts["verify_s"][-1], parts["host_s"])
        times = " | ".join(f"{1e3 * seconds:.2f} ms" for seconds in (*alone, *drafted))
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
        write_report(given.json, report)
    print(table(report))


if __name__ == "__main__":
    main()

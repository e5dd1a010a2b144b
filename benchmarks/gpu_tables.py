"""Tables of decoding and training on a GPU: files of ``benchmarks.gpu``, and of a training's progress there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.decode_tables import interval
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table


def tables(folder: Path) -> str:
    """Return two tables for each file: our methods by category, and one for the prompts that transformers answered."""
    parts = []
    for stem, written in read_named(folder):
        report, beside = written["report"], written["beside"]
        ceiling = written["bytes_per_s"] / written["pass_bytes"]
        plain = statistics.fmean(part["runs"][0]["tokens_per_s"] for part in report)
        parts.append(
            f"**{written['model']}** on one {written['provenance']['device']}, bfloat16, greedy, batch "
            f"{report[0]['batch']}, {report[0]['num_prompts']} prompts of each category, up to {written['tokens']} "
            f"tokens (`{stem}.json`). {_machine(written['provenance'])}. Reading the weights once would take "
            f"{1e6 / ceiling:.0f} µs, so that plain decoding is at {plain / ceiling:.0%} of that bound. "
            f"Texts that differ from plain's: {sum(run['num_different'] for part in report for run in part['runs'])}."
        )
        parts.append(_speeds(report))
        if beside:
            printed = ", read from what the run printed: its time ended before the others" * (
                "beside_is_printed" in written
            )
            count = max(part["num_prompts"] for part in beside)
            prompts = "one prompt" if count == 1 else f"{count} prompts"
            parts.append(
                f"Beside transformers {written['provenance']['packages']['transformers']}, {prompts} of a category"
                f"{printed}. *compiled*: a static cache, whose steps PyTorch compiles and records."
            )
            parts.append(_beside(beside))
    return "\n\n".join(parts) or NO_RUN


def trainings(folder: Path) -> str:
    """Return a sentence and a table for each training, or for each series of trainings in turn: agreement on held-back
    rows as tokens were learnt from.
    """
    parts = []
    for stem, written in read_named(folder):
        if "systems" in written:
            parts += _series(stem, written)
            continue
        rate = statistics.median(step["tokens_per_s"] for step in written["steps"])
        answers, last = written["answers"], written["held_back"][-1]
        parts.append(
            f"**{written['model']}** on one {written['provenance']['device']} (`{stem}.json`), recipe "
            f"`{written['recipe']}` with `{' '.join(f'{name}={value}' for name, value in written['values'].items())}`: "
            f"{answers['tokens']:,} tokens of its own answers were written in "
            f"{answers['seconds']} s, {answers['batch']} prompts at a time, and {last['step']:,} steps of "
            f"{written['minutes'] * 60:.0f} s made of them, {rate:,.0f} predicted tokens a second. "
            f"{_machine(written['provenance'])}."
        )
        rows = [(f"{held['step']:,}", f"{held['agreement']:.2f}", f"{held['kl']:.2f}") for held in written["held_back"]]
        parts.append(table(("step", "guesses that agree, held-back rows", "KL divergence"), rows))
    return "\n\n".join(parts) or NO_RUN


def _series(stem: str, written: Mapping[str, Any]) -> list[str]:
    """Return a sentence and a table for systems that were trained in turn for as many seconds each."""
    answers, systems = written["answers"], written["systems"]
    minutes = max(system["minutes"] for system in systems.values())
    caption = (
        f"**{written['model']}** on one {written['provenance']['device']} (`{stem}.json`): {len(systems)} drafters "
        f"trained in turn by `benchmarks.rivals own` for {minutes * 60:.0f} s of the GPU each, with "
        f"`{' '.join(f'{name}={value}' for name, value in written['values'].items())}`, on {answers['tokens']:,} "
        f"tokens of its own answers to {answers['prompts']:,} prompts of use, written in {answers['seconds']:.0f} s. "
        f"{_machine(written['provenance'])}."
    )
    rows = [
        (f"`{name}`", f"{system['steps']:,}", f"{system['tokens']:,}", _guesses(system["held_back"][-1]))
        for name, system in systems.items()
    ]
    return [caption, table(("system", "steps", "predicted tokens", "guesses that agree, held-back rows"), rows)]


def _guesses(held_back: Mapping[str, float]) -> str:
    """Return the agreement of a drafter's guesses, one of them or one for each head or stream."""
    if "agreement" in held_back:
        return f"{held_back['agreement']:.2f}"
    several = [value for name, value in held_back.items() if name.startswith(("head", "stream"))]
    return ", ".join(f"{value:.2f}" for value in several)


def _machine(provenance: Mapping[str, Any]) -> str:
    packages = provenance["packages"]
    return f"PyTorch {packages['torch']}, {provenance['cpu']}, {captions.tree(provenance)}"


def _speeds(report: Sequence[Mapping[str, Any]]) -> str:
    names = [run["method"] for run in report[0]["runs"]]
    rows = [
        (
            f"{part['category']} ({part['prompt_tokens']:.0f} tokens)",
            f"{part['runs'][0]['tokens_per_s']:.0f}/s",
            *(f"{interval(run)}, {run['tokens_per_target_pass']:.2f}" for run in part["runs"][1:]),
        )
        for part in report
    ]
    heads = (f"{name}, tokens a pass" for name in names[1:])
    return table(("prompts", "plain", *heads), rows)


def _beside(report: Sequence[Mapping[str, Any]]) -> str:
    names = [run["method"] for run in report[0]["runs"]]
    rows = [
        (
            f"{part['category']} ({part['prompt_tokens']:.0f} tokens)",
            *(f"{run['tokens_per_s']:.0f}/s, {run['speedup']:.2f}x" for run in part["runs"]),
        )
        for part in report
    ]
    return table(("prompt", *names), rows)

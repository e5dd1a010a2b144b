"""Tables of what a guard costs and finds, of soft prompts, and of adapters that are swapped under load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table

NAMES = {
    "as_text": "in the user's turn",
    "as_material": "as material",
    "as_material_behind_rules": "as material, rules",
}


def guards(folder: Path) -> str:
    """Return the tables of every model that was measured with a guard."""
    parts: list[str] = []
    for written in _read(folder, "guard"):
        found, origin = written["guard"], written["provenance"]
        shared = {"others_cpu_share": found.get("cpu_share_of_others")}
        machine = f"{captions.machine(origin, origin['best_kernels'])}{captions.others(shared)}"
        if "overhead" in found:
            parts += _overhead(found["model"], found["overhead"], machine)
        if "injections" in found:
            parts += _attacks(found["model"], found["injections"], captions.machine(origin, origin["best_kernels"]))
        if "scope" in found:
            parts += _scope(found["model"], found["scope"], captions.machine(origin, "torch"))
    return "\n\n".join(parts) or NO_RUN


def _overhead(model: str, found: Mapping[str, Any], machine: str) -> list[str]:
    same = "the texts are the same" if found["same_texts"] else "**the texts differ**"
    caption = (
        f"**{model}**, plain decoding; rules for mail, cards, IBANs and a hundred words, a head of two categories; "
        f"{found['repeats']} repeats in turns; {same}. {machine}."
    )
    names = {"none": "no guard", "rules": "rules", "rules_and_head": "rules and a head"}
    rows = [(what, f"{found['token_us'][n]:.0f}", f"{found['more'][n]:+.1%}") for n, what in names.items()]
    return [caption, table(("", "µs a token", "more"), rows)]


def _attacks(model: str, found: Mapping[str, Any], machine: str) -> list[str]:
    count = found["attacks"]
    caption = (
        f"**{model}**, {count} attacks in texts to sum up: how many are obeyed. The rules block {found['blocked']} of "
        f"{count} attacks, and {found['clean_blocked']} of {found['clean_documents']} documents without one. "
        f"{machine}."
    )
    rows = [(what, f"{found['obeyed'][name]} of {count}") for name, what in NAMES.items()]
    return [caption, table(("the text", "obeyed"), rows)]


def _scope(model: str, found: Mapping[str, Any], machine: str) -> list[str]:
    n, best = found["rows"], found["tfidf"]["best"]
    caption = (
        f"**{model}**, CLINC150: {n['train']:,} requests in scope and {n['oos_train']} others to learn from, "
        f"{n['val']:,} and {n['oos_val']} of the development part to measure on. {machine}."
    )
    pairs = {"head on the model's residuals": found["head"], f"TF-IDF ({best['grams']}), logistic regression": best}
    rows = [(what, f"{each['area']:.3f}", f"{each['found_at_5_percent']:.0%}") for what, each in pairs.items()]
    return [caption, table(("", "area under the curve", "found at 5 % false refusals"), rows)]


def swaps(folder: Path) -> str:
    """Return the table of loads with and without swaps."""
    parts: list[str] = []
    for written in _read(folder, "swapping"):
        s, origin = written["swapping"], written["provenance"]
        shared = {"others_cpu_share": s.get("cpu_share_of_others")}
        machine = f"{captions.machine(origin, origin['best_kernels'])}{captions.others(shared)}"
        mebibytes = round(s["grown_kib"] / 1024)
        grown = f"grew by {mebibytes} MiB" if mebibytes > 0 else "did not grow"
        parts.append(
            f"**{s['model']}**, {s['clients']} clients for {s['seconds']:.0f} s, {s['adapters']} LoRAs of "
            f"rank {s['rank']} and room for {s['room']}: {s['swaps']} swaps, each {s['swap_p50_ms']:.0f} ms "
            f"(p99 {s['swap_p99_ms']:.0f} ms); the process {grown} meanwhile. {machine}."
        )
        pairs = {"the same LoRAs all the time": s["without_swaps"], "LoRAs that come and go": s["with_swaps"]}
        rows = [
            (
                what,
                str(each["answers"]),
                str(each["wrong"] + each["failed"]),
                f"{each['p50_ms']:.0f} / {each['p99_ms']:.0f}",
                f"{each['most_adapter_bytes'] / s['budget_bytes']:.0%}",
            )
            for what, each in pairs.items()
        ]
        parts.append(table(("", "answers", "wrong or failed", "ms between tokens, p50 / p99", "of the budget"), rows))
    return "\n\n".join(parts) or NO_RUN


def _read(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield the result files of a folder that hold this."""
    for _, written in read_named(folder):
        if key in written:
            yield written

"""The table of decoding with LoRAs, from files that ``benchmarks.adapters`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import tables_of
from tools.blocks import table

RATIOS = {
    "one": ("one request with a LoRA, beside the base", "one with a LoRA"),
    "all": ("as many requests as LoRAs, each with its own, beside as many on the base", "all with LoRAs"),
    "batch": ("the same in one batch, beside one after another", "all with LoRAs"),
}


def tables(folder: Path) -> str:
    """Return one table for each model that was measured."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    parts = []
    for report in written["reports"]:
        s, speeds = report["setting"], report["tokens_per_s"]
        machine = captions.machine(written["provenance"], s["kernels"])
        parts.append(
            f"**{s['model']}**, weights {s['weights']}, `{s['method']}`, {s['count']} LoRAs of rank {s['rank']} on "
            f"every matrix, {s['new_tokens']} tokens, {s['repeats']} repeats in turns; {report['num_different']} "
            f"texts of the batch differ from those written one after another. {machine}{captions.others(s)}."
        )
        read = _ratios_of_bytes(s)
        rows: list[tuple[str, ...]] = [
            (what, f"{speeds[key]:.0f}", f"{report['ratios'][name]:.2f}x", read.get(name, ""))
            for name, (what, key) in RATIOS.items()
        ]
        if (theirs := report["peft_tokens_per_s"]) is not None:
            ours = speeds["all with LoRAs"] / theirs
            rows.append(("PEFT's mixed batch of these; ours beside it", f"{theirs:.0f}", f"{ours:.2f}x", ""))
        if (theirs := report.get("llama_cpp_tokens_per_s")) is not None:
            rows += _beside_llama_cpp(speeds, theirs)
        parts.append(table(("", "tokens a second", "ratio", "if reading weights took all the time"), rows))
    return parts


def _ratios_of_bytes(setting: Mapping[str, Any]) -> dict[str, str]:
    """Return the ratios that weights alone would give where a pass takes as long as reading them from memory."""
    if "factor_bytes" not in setting:
        return {}
    base, lora, count = setting["pass_bytes"], setting["factor_bytes"], setting["count"]
    found = {
        "one": base / (base + lora),
        "all": base / (base + count * lora),
        "batch": count * (base + lora) / (base + count * lora),
    }
    return {name: f"{ratio:.2f}x" for name, ratio in found.items()}


def _beside_llama_cpp(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return llama.cpp's rows: what a LoRA costs it, and its speed beside ours."""
    one, each = theirs["one with a LoRA"], theirs["one after another"]
    return [
        (
            "llama.cpp, one request with a LoRA, beside its base",
            f"{one:.0f}",
            f"{one / theirs['one on the base']:.2f}x",
            "",
        ),
        ("the same; ours beside it", f"{one:.0f}", f"{ours['one with a LoRA'] / one:.2f}x", ""),
        (
            "llama.cpp, each its own LoRA, one after another; ours in one batch beside it",
            f"{each:.0f}",
            f"{ours['all with LoRAs'] / each:.2f}x",
            "",
        ),
    ]

"""The table of answers and perplexities beside transformers, from files that ``benchmarks.truth`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table

HEADINGS = (
    "checkpoint",
    "prompts",
    "longest",
    "float32: equal answers",
    "largest gap",
    "perplexity, ours / theirs",
    "bfloat16: unlike float32, ours / theirs",
)


def tables(folder: Path) -> str:
    """Return one table for each machine and commit."""
    parts: dict[str, list[tuple[str, ...]]] = {}
    for _, found in read_named(folder):
        caption = captions.heading(found["provenance"], found["kernels"])
        parts.setdefault(caption, []).append(row(found))
    made = [f"{caption}.\n\n{table(HEADINGS, rows)}" for caption, rows in parts.items()]
    return "\n\n".join(made) or NO_RUN


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of one comparison."""
    unlike, perplexity, rounded = found["float32"], found.get("perplexity"), found.get("bfloat16")
    gaps = [one["gap"] for one in unlike if one["gap"] is not None]
    return (
        f"`{found['model']}`",
        f"{found['num_prompts']} x {found['max_new_tokens']} tokens",
        f"{found['longest_prompt']:,} tokens",
        f"{found['num_prompts'] - len(unlike)} of {found['num_prompts']}",
        f"{max(gaps):.1e}" if gaps else "-",
        f"{perplexity['ours']:.5f} / {perplexity['theirs']:.5f} ({perplexity['num_tokens']:,} tokens)"
        if perplexity
        else "-",
        f"{rounded['ours_unlike_float32']} / {rounded['theirs_unlike_float32']}" if rounded else "-",
    )

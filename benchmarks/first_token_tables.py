"""Table of the time to the first token, from files that ``vivace bench prefill --json`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import tables_of
from tools.blocks import table

HEADINGS = ("prompt tokens", "prefill", "first token", "speed-up", "layer passes", "predicted")
ANSWER_HEADINGS = ("time predicted", "whole answer", "speed-up", "tokens/s behind it")


def tables(folder: Path) -> str:
    """Return one table for each file."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    setting = written["setting"]
    has_answers = "new_tokens" in setting  # older files know first tokens only
    rows = [
        (
            f"{row['num_tokens']:,}",
            row["prefill"],
            f"{row['first_token_s'] * 1e3:,.0f} ms",
            f"{row['speedup']:.2f}x",
            f"{row['measured_share']:.1%}",
            f"{row['predicted_share']:.1%}",
            *(_answer(row) if has_answers else ()),
        )
        for row in written["rows"]
    ]
    answers = f", answers of {setting['new_tokens']} tokens" if has_answers else ""
    keep = f", `--keep {setting['keep']}`" if setting["keep"] is not None else ""
    caption = (
        f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}; "
        f"{setting['model']}, {setting['dtype']}{keep}, median of {setting['repeats']}, ways in turns{answers}."
    )
    return [caption, table((*HEADINGS, *(ANSWER_HEADINGS if has_answers else ())), rows)]


def _answer(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of the whole answer, and of the time that was predicted."""
    predicted, answer, rate = row["predicted_s"], row["answer_s"], row["decode_tokens_per_s"]
    beside = "" if predicted is None else f"{predicted / row['first_token_s'] - 1:+.0%}"
    return beside, f"{answer * 1e3:,.0f} ms", f"{row['answer_speedup']:.2f}x", f"{rate:.0f}"

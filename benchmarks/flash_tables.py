"""Tables of the ablation of LLM in a flash, from the files of ``results/flash`` that ``benchmarks.flash run`` wrote."""

from __future__ import annotations

from pathlib import Path

from benchmarks import captions
from benchmarks.flash import Row, equal_ms, fastest_like, table
from benchmarks.result_files import NO_RUN, read_named


def tables(folder: Path) -> str:
    """Return one table for each file."""
    parts = []
    for stem, report in read_named(folder):
        p, model = report["provenance"], report["model"]
        times = max(len(each) for each in report["repeats"].values())
        parts.append(
            f"**{stem}**: {model['bytes'] / 1e9:.2f} GB on disk, {model['share']:.0%} of it as memory, "
            f"{model['new_tokens']} tokens, {times} run{'s' * (times > 1)} of each row; {p['cpu']}, "
            f"{report['threads'] or p['num_threads']} thread(s), a disk of {report['device_gb_per_s']:.2f} GB/s, "
            f"{captions.tree(p)}. Times are those of decoded tokens, the prompt left out."
        )
        rows = [Row(**row) for row in report["rows"]]
        parts += [_equal(rows), table(rows)]
    return "\n\n".join(parts) or NO_RUN


def _equal(rows: list[Row]) -> str:
    """Return a sentence on the speed-up of the last rows if the first row had read as fast as the second."""
    first, fastest = rows[0], fastest_like(rows)
    gains = [equal_ms(first, fastest) / row.ms for row in rows if "bundling" in row.name or "native" in row.name]
    return (
        f"`{first.name}` read at {first.gb_per_s:.2f} GB/s where `{fastest.name}` read at {fastest.gb_per_s:.2f} "
        "from the same "
        f"disk. Had it read as fast, the last rows would be {min(gains):.1f} to {max(gains):.1f} times as fast as "
        "it, not "
        f"{min(first.ms / row.ms for row in rows if 'bundling' in row.name):.1f} to "
        f"{max(first.ms / row.ms for row in rows):.1f} times."
    )

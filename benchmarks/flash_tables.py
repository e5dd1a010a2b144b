"""The ablation of LLM in a flash as Markdown: the files of ``results/flash``, which ``benchmarks.flash run`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.flash import Row, table


def tables(folder: Path) -> str:
    """One table a file."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        p, model = report["provenance"], report["model"]
        times = max(len(each) for each in report["repeats"].values())
        parts.append(
            f"**{path.stem}**: {model['bytes'] / 1e9:.2f} GB on disk, {model['share']:.0%} of it as memory, "
            f"{model['new_tokens']} tokens, {times} run{'s' * (times > 1)} of each row; {p['cpu']}, "
            f"{report['threads'] or p['num_threads']} thread(s), a disk of {report['device_gb_per_s']:.2f} GB/s, "
            f"commit {p['commit'] or 'unknown'}."
        )
        parts.append(table([Row(**row) for row in report["rows"]]))
    return "\n\n".join(parts) or "No run is committed yet."

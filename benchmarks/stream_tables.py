"""Speculative streams beside what their paper reports, and what they weigh, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.blocks import table
from vivace.multistream.config import MultistreamConfig

PAPER = (
    ("E2E", "OPT-1.3b", 3.72, 2.45),
    ("E2E", "Phi-1.3b", 3.69, 2.84),
    ("E2E", "OpenLlama-7b", 3.55, 2.96),
    ("SQL", "OPT-1.3b", 3.57, 2.39),
    ("SQL", "Phi-1.3b", 3.53, 2.62),
    ("SQL", "OpenLlama-7b", 4.13, 3.14),
)
"""Prompts, model, call reduction, speed-up: Bhendawade et al. 2024, arXiv:2402.11131v1, table 1."""
SHAPES = (
    ("vivace-14m", 256, 4096),
    ("OPT-1.3b", 2048, 50272),
    ("OpenLlama-7b", 4096, 32000),
)
"""Model, E, V."""


def beside_paper(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Committed runs of ``multistream`` by title, then the paper's."""
    rows = [
        (title, "lossless", f"{run['tokens_per_target_pass']:.2f}", f"{run['speedup']:.2f}x")
        for title, run in runs
        if run["method"] == "multistream"
    ]
    rows += [
        (f"the paper, {model}, {task}", "shared", f"{calls:.2f}", f"{speed:.2f}x")
        for task, model, calls, speed in PAPER
    ]
    return table(("model, prompts, kernels", "mode", "tokens per target pass", "beside plain"), rows)


def shared(folder: Path) -> str:
    """The shared mode beside a plain fine-tune of as many steps: files that ``benchmarks.shared_mode`` wrote."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), reverse=True):
        found |= json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for name, told in found.items():
        quality, streams = told["quality"], told["streams"]
        beside = "-" if told["ratio"] is None else "{:.3f} ({:.3f} to {:.3f})".format(*told["ratio"])
        kernels = f"{told['kernels']}, {told['provenance']['cpu']}"
        rows.append(
            (
                f"{name}, {told['num_prompts']:,} prompts",
                f"{quality['shared']:.4f}",
                f"{quality['plain']:.4f}",
                beside,
                f"{streams['tokens_per_target_pass']:.2f}",
                f"{streams['speedup']:.2f}x, {'same' if streams['identical'] else 'OTHER'} text",
                kernels,
            )
        )
    heads = ("prompts", "shared", "plain fine-tune", "ratio", "tokens a pass", "beside own plain decoding", "kernels")
    return table(heads, rows)


def weights() -> str:
    """The paper's count for four streams and a pruner of rank eight, and Medusa's for as many heads."""
    config = MultistreamConfig(streams=4, insertion=1, rank=0, bottleneck=0, pruner_rank=8)
    rows = []
    for model, width, vocab_size in SHAPES:
        own, heads = config.num_paper_parameters(width), config.num_medusa_parameters(width, vocab_size)
        rows.append((model, str(width), str(vocab_size), f"{own:,}", f"{heads:,}", f"{heads / own:,.0f}"))
    return table(("model", "E", "V", "streams: 4 E + 2 x 8 E", "Medusa: 4 (E^2 + E V)", "ratio"), rows)

"""Tables of speculative streams: beside the paper's results, by their parts, and the sizes of their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.decode_tables import interval
from benchmarks.rivals_table import stream_layers
from benchmarks.trainings import training
from tools.blocks import table
from vivace.methods.multistream.config import MultistreamConfig

PAPER = (
    ("E2E", "OPT-1.3b", 3.72, 2.45),
    ("E2E", "Phi-1.3b", 3.69, 2.84),
    ("E2E", "OpenLlama-7b", 3.55, 2.96),
    ("SQL", "OPT-1.3b", 3.57, 2.39),
    ("SQL", "Phi-1.3b", 3.53, 2.62),
    ("SQL", "OpenLlama-7b", 4.13, 3.14),
)
"""Prompts, model, call reduction and speed-up in table 1 of Bhendawade et al. 2024, arXiv:2402.11131v1."""
SHAPES = (
    ("vivace-14m", 256, 4096),
    ("OPT-1.3b", 2048, 50272),
    ("OpenLlama-7b", 4096, 32000),
)
"""Model, E and V."""
LAYERS, INSERTION = 24, 12
"""Number of layers of the model in the ablation, and the insertion layer of its streams unless a row names another."""


def beside_paper(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the committed runs of ``multistream``, in a table for each kind of machine, then the paper's rows."""
    played = [report for report in reports if any(run["method"] == "multistream" for run in report["runs"])]
    parts = []
    kinds = captions.by_kind(played, lambda report: (report["provenance"]["cpu"], report["setting"]["kernels"]))
    for group in kinds.values():
        trees = dict.fromkeys(captions.tree(report["provenance"]) for report in group)
        name = captions.kernels(group[0]["provenance"], group[0]["setting"]["kernels"])
        parts.append(
            f"**{group[0]['provenance']['cpu']}, {name}**, {'; '.join(trees)}. `attach: kept` in every row: a step "
            "has a "
            "pass of all layers to verify and a second one through the layers above the insertion, for the streams "
            "of the "
            "kept node; tokens a target pass count the first only. No row runs `every`, the paper's verification and "
            "drafting in one pass."
        )
        parts.append(table(HEADER, [_measured(report) for report in group]))
    mode = "shared, `every`"
    paper = [(f"{model}, {task}", mode, f"{calls:.2f}", f"{speed:.2f}x") for task, model, calls, speed in PAPER]
    parts.append("The paper's rows:")
    parts.append(table(("model, prompts", "mode, attach", "tokens a target pass", "beside plain"), paper))
    return "\n\n".join(parts)


HEADER = (
    *("model, prompts", "mode, attach", "training", "tokens a target pass", "layer passes a step"),
    *("tokens for as many layer passes as a token of plain decoding has", "beside plain", "whole answers"),
)


def _measured(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of one report."""
    runs = {run["method"]: run for run in report["runs"]}
    run, plain = runs["multistream"], runs["plain"]
    layers = stream_layers(run)
    assert layers is not None
    kept = run["tokens_per_target_pass"]
    model = report["setting"]["model"]
    return (
        f"{model}, {report['setting']['prompts']}",
        "lossless, `kept`",
        training(model, "multistream", run.get("training")),
        f"{kept:.2f}",
        f"{layers[0]} + {layers[1]}",
        f"{kept * layers[0] / sum(layers):.2f}",
        f"{run['speedup']:.2f}x",
        f"{captions.whole_answers(run, plain):.2f}x",
    )


def parts(path: Path) -> str:
    """Return the ablation of ``benchmarks.streams``: every part of streams, and drafts of other widths."""
    report = json.loads(path.read_text(encoding="utf-8"))
    caption = (
        f"{captions.heading(report['provenance'], report['kernels'])}; {report['prompts']}, "
        f"{report['num_prompts']} "
        f"prompts. Every variant was trained for {report['steps']} steps. `attach: kept` in every row: layer passes "
        "of a "
        "step are those of the target pass and those of the streams behind it. Chains are made in native calls of "
        "several "
        "steps; trees, pruned drafts and rotated values go through Python in every step, so their speeds are of "
        "another "
        "kind of step than the chains'."
    )
    heads = ("weights", "tokens a target pass", "layer passes a step", "kept by position")
    heads += ("beside plain", "whole answers")
    found = [caption]
    for title, key in (("variant", "variants"), ("draft of the first", "drafts")):
        plain, *runs = report[key]
        found.append(table((title, *heads, "text"), [_part(run, plain, report["weights"]) for run in runs]))
    return "\n\n".join(found)


def _part(run: Mapping[str, Any], plain: Mapping[str, Any], weights: Mapping[str, int]) -> tuple[str, ...]:
    """Return the row of one variant."""
    name = run["method"]
    inserted = int(name.removeprefix("insertion ")) if name.startswith("insertion ") else INSERTION
    return (
        name,
        f"{weights[name]:,}" if name in weights else "",
        f"{run['tokens_per_target_pass']:.2f}",
        f"{LAYERS} + {LAYERS - inserted}",
        ", ".join(f"{share:.2f}" for share in run["acceptance_per_position"]),
        interval(run),
        f"{captions.whole_answers(run, plain):.2f}x",
        "same" if run["identical"] else "differs",
    )


def shared(folder: Path, starts: Mapping[str, tuple[float, str]]) -> str:
    """Return the shared mode beside a plain fine-tune of as many steps, and beside the model that both start from.

    Args:
        folder: files that ``benchmarks.shared_mode`` wrote.
        starts: quality of the starting model by prompt set, and its source.

    Raises:
        ValueError: the files are of different processors or kernels, or the start of a prompt set is unknown.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), reverse=True):
        found |= json.loads(path.read_text(encoding="utf-8"))
    if not found:
        return "No result is committed yet."
    kinds = {(told["provenance"]["cpu"], told["kernels"]) for told in found.values()}
    if len(kinds) > 1:
        raise ValueError(f"one table of the shared mode over several machines: {sorted(kinds)}")
    if unknown := set(found) - set(starts):
        raise ValueError(f"the shared mode's start is not known on {', '.join(sorted(unknown))}")
    trees = dict.fromkeys(captions.heading(told["provenance"], told["kernels"]) for told in found.values())
    caption = (
        f"{'; '.join(trees)}. `attach: kept`: {LAYERS} layer passes of the target and {LAYERS - INSERTION} of the "
        "streams a step. Speed is of decoding; that of whole answers was not recorded."
    )
    rows = []
    for name, told in found.items():
        quality, streams = told["quality"], told["streams"]
        beside = "-" if told["ratio"] is None else "{:.3f} ({:.3f} to {:.3f})".format(*told["ratio"])
        rows.append(
            (
                f"{name}, {told['num_prompts']:,} prompts",
                "{:.4f} ({})".format(*starts[name]),
                f"{quality['shared']:.4f}",
                f"{quality['plain']:.4f}",
                beside,
                f"{streams['tokens_per_target_pass']:.2f}",
                f"{streams['speedup']:.2f}x, {'same' if streams['identical'] else 'OTHER'} text",
            )
        )
    worse = all(max(told["quality"].values()) < starts[name][0] for name, told in found.items())
    lead = "**Both fine-tunes are worse than the model that they start from, on all prompts.** " if worse else ""
    heads = ("prompts", "the start", "shared", "plain fine-tune", "shared / plain")
    heads += ("tokens a target pass", "beside plain")
    return f"{lead}{caption}\n\n{table(heads, rows)}"


def weights() -> str:
    """Return the paper's number of weights for four streams and a pruner of rank eight, and Medusa's for as many
    heads.
    """
    config = MultistreamConfig(streams=4, insertion_layer=1, rank=0, bottleneck=0, pruner_rank=8)
    rows = []
    for model, width, vocab_size in SHAPES:
        own, heads = config.num_paper_parameters(width), config.num_medusa_parameters(width, vocab_size)
        rows.append((model, str(width), str(vocab_size), f"{own:,}", f"{heads:,}", f"{heads / own:,.0f}"))
    return table(("model", "E", "V", "streams: 4 E + 2 x 8 E", "Medusa: 4 (E^2 + E V)", "ratio"), rows)

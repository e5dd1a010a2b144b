"""Write tables and plots from committed results: ``python -m benchmarks.report`` (``--check`` only compares).

A result is a file written by ``vivace bench decode --json benchmarks/results/decode/NAME.json``. The files are read in
the order of their names; they fill parts of the README (a sentence, a table for each kind of kernels, two plots),
``docs/results.md`` (all other figures) and ``docs/techniques/multirate.md``. Results of other machines and earlier
commits are in ``benchmarks/results/earlier`` and follow in ``docs/results.md``. Other folders belong to other scripts,
and the pages of techniques show them. The same files give the same text and, with the same matplotlib, the same plots.

``captions.py`` writes the captions. The README only takes results of clean commits and of one processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    ablation,
    adapter_table,
    bars,
    beam_quality,
    beam_tables,
    capped,
    capped_expert_tables,
    captions,
    chat_tables,
    checksums,
    expert_tables,
    family_tables,
    features,
    first_token_tables,
    flash_tables,
    gates,
    gguf_divergence,
    gpu_tables,
    guard_table,
    hostile_tables,
    killed_training,
    over_lora,
    palette_tables,
    parallel_tables,
    pass_tables,
    plots,
    prefill_growth,
    prefill_peers,
    prefill_tables,
    prompt_beside_streams,
    prompt_caches,
    prompt_choice,
    prompt_pool,
    rivals_own,
    rivals_table,
    screened_tables,
    speed_law,
    stream_tables,
    stream_ways,
    thresholds,
    tradeoff,
    truth_table,
)
from benchmarks.decode_tables import NONE_YET, Result, details, read_results, summary, technique
from tools.blocks import fill_file, settle, table
from vivace.evaluate.speed_law import ModelShape, head_share

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DECODE = RESULTS / "decode"
"""Results that the README shows."""
EARLIER = RESULTS / "earlier"
"""Results of other machines, other models and earlier commits; none of them is in the README."""
RIVALS = RESULTS / "rivals"
"""Files that ``benchmarks.rivals measure`` wrote."""
QUALITY = RESULTS / "quality"
"""Files that ``vivace evaluate --json`` wrote."""
CARD = ROOT / "src" / "vivace" / "weights" / "vivace-14m" / "README.md"
"""Model card of the model that ships."""
SUMMARISER = CARD.parents[1] / "vivace-2m" / "README.md"
"""Model card of the encoder-decoder that ships."""
MIXTURE = CARD.parents[1] / "vivace-5m-moe" / "README.md"
"""Model card of the mixture of experts that ships."""
IMAGES = ROOT / "docs" / "images"

__all__ = ["NONE_YET", "details", "read_results", "summary", "technique", "wanted"]


def law(results: Sequence[Result]) -> str:
    """Return predicted beside measured speed-ups, and predictions for a large model from the acceptance measured
    here.
    """
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / "law").glob("*.json"))]
    parts = []
    for report in reports:
        provenance, rows = report["provenance"], report["rows"]
        machine = captions.machine(provenance, rows[0]["kernels"])
        parts += [f"**{rows[0]['model']}**: {machine}; speeds are those of decoding.", speed_law.table({"rows": rows})]
    shapes = [
        (f"V = {vocabulary // 1000}k{', q4' if read < 1 else ''}", ModelShape(4, 32, share, 0.05, read, head_read))
        for vocabulary in (4000, 32000, 128000)
        for share in (head_share(2048, 5504, 32, vocabulary),)
        for read, head_read in ((1.0, 1.0), (0.3, 0.5))
    ]
    found = {
        (result.setting["model"], result.prompt_set): tuple(_best(shape, run) for _, shape in shapes)
        for result in results
        for run in result.runs
        if run["method"] == "multirate" and result.setting["kernels"] != "torch" and not result.is_twin
    }
    rows = [(", ".join(where), *gains) for where, gains in found.items()]
    return "\n\n".join([*parts, table(("acceptance of", *(name for name, _ in shapes)), rows)] if rows else parts)


def _best(shape: ModelShape, run: dict[str, Any]) -> str:
    """Return the largest speed-up and the number of draft tokens that gives it."""
    guesses, gain = shape.best(run["acceptance_per_position"])
    return f"{gain:.2f}x ({guesses})"


def starts() -> dict[str, tuple[float, str]]:
    """Return the quality of the models from which the shared mode and the fine-tune beside it started, and its
    source.
    """
    found = {
        "e2e-dev": (bars.quality_of(QUALITY, "e2e", "rouge_l") / 100, "`quality/e2e.json`"),
        "wikisql-dev": (bars.quality_of(QUALITY, "sql", "exact_match"), "`quality/sql.json`"),
    }
    return {**found, "advising-dev": (19 / 229, "19 of 229, from the log")}


def wanted(results: Sequence[Result]) -> dict[Path, str]:
    """Return the text that every page with generated parts should have."""
    docs = ROOT / "docs"
    techniques = docs / "techniques"
    rivals = rivals_table.read_reports(RIVALS)
    earlier = read_results(EARLIER)
    everything = [*results, *(result for result in earlier if captions.is_clean(result.provenance))]
    parts = {
        ROOT / "README.md": {"results": summary(results)},
        docs / "results.md": {
            "results": details(results),
            "earlier": details(earlier),
            "passes": pass_tables.tables(RESULTS / "passes"),
        },
        docs / "training.md": {"killed": killed_training.tables(RESULTS / "killed_training")},
        techniques / "rivals.md": {"results": rivals_table.tables(rivals)},
        techniques / "multistream.md": {
            "results": stream_tables.beside_paper(rivals),
            "ways": stream_ways.tables(RESULTS / "streams" / "ways.json"),
            "parts": stream_tables.parts(RESULTS / "streams" / "streams.json"),
            "shared mode": stream_tables.shared(RESULTS / "shared", starts()),
            "weights": stream_tables.weights(),
        },
        techniques / "dynamic_depth.md": {"trade-off": tradeoff.tables(RESULTS / "tradeoff")},
        techniques / "flash.md": {
            "results": flash_tables.tables(RESULTS / "flash"),
            "thresholds": thresholds.tables(RESULTS / "thresholds"),
            "capped": capped.tables(RESULTS / "flash" / "capped" / "smollm2.json"),
            "checksums": checksums.tables(RESULTS / "checksums"),
        },
        techniques / "experts.md": {
            "capped": capped_expert_tables.tables_of(RESULTS / "experts-capped"),
            "headline": expert_tables.headline(RESULTS / "experts" / "paced.json"),
            "results": expert_tables.tables(RESULTS / "experts"),
            "sweep": expert_tables.sweep(RESULTS / "sweep" / "experts.json", RESULTS / "experts"),
        },
        techniques / "multirate.md": {
            "law": law(everything),
            "results": technique(everything, "multirate"),
            "ablation": ablation.tables(RESULTS / "ablation"),
            "shapes": ablation.tables(RESULTS / "shapes"),
            "gates": gates.tables(RESULTS / "gates"),
        },
        techniques / "palette.md": {
            "quality": palette_tables.quality(RESULTS / "palettes"),
            "memory": palette_tables.memory(RESULTS / "clustering"),
            "kernels": palette_tables.kernels(RESULTS / "kernels" / "palettes.json"),
            "steps": palette_tables.steps(RESULTS / "clustering"),
        },
        techniques / "low_bit_weights.md": {"bars": bars.tables(RESULTS / "passes"), "formats": bars.formats(QUALITY)},
        techniques / "screened_head.md": {"results": screened_tables.tables(RESULTS / "screened")},
        docs / "gpu.md": {
            "results": gpu_tables.tables(RESULTS / "gpu"),
            "training": gpu_tables.trainings(RESULTS / "gpu_training"),
        },
        techniques / "drafting_for_chat.md": {
            "rivals": rivals_own.tables(RESULTS / "chat_rivals"),
            "results": chat_tables.tables(RESULTS / "chat"),
            "regimes": chat_tables.regimes(RESULTS / "regimes"),
            "others": chat_tables.beside_others(read_results(RESULTS / "foreign")),
        },
        techniques / "lazy.md": {
            "speed": first_token_tables.tables(RESULTS / "prefill"),
            "quality": prefill_tables.tables(RESULTS / "prefill" / "quality"),
            "sets": prefill_tables.over_sets(RESULTS / "prefill" / "quality"),
            "beside": prefill_tables.beside_paper(RESULTS / "prefill" / "quality", "nq20"),
            "growth": prefill_growth.tables(RESULTS / "prefill" / "growth" / "smollm2-135m.json"),
            "peers": prefill_peers.tables(RESULTS / "prefill" / "peers"),
            "server": prompt_beside_streams.tables(RESULTS / "prefill" / "server"),
        },
        techniques / "beams.md": {
            "speed": beam_tables.tables(RESULTS / "beams"),
            "ablation": beam_tables.ablation(RESULTS / "beams"),
            "n-grams": beam_tables.ngrams(RESULTS / "beams" / "ngrams.json"),
            "dialogues": beam_quality.tables(RESULTS / "beams" / "quality-dialogsum.json"),
        },
        techniques / "adapters.md": {
            "speed": adapter_table.tables(RESULTS / "adapters"),
            "drafts": over_lora.tables(RESULTS / "over_lora"),
            "features": features.tables(RESULTS / "features"),
            "swaps": guard_table.swaps(RESULTS / "guard"),
        },
        techniques / "guard.md": {"results": guard_table.guards(RESULTS / "guard")},
        techniques / "prompt_pool.md": {
            "results": prompt_pool.tables(RESULTS / "prompt_pool"),
            "cost": prompt_choice.tables(RESULTS / "prompt_choice"),
        },
        techniques / "quantized_checkpoints.md": {
            "results": chat_tables.beside_others(read_results(RESULTS / "quantized")),
            "divergence": gguf_divergence.table_of(RESULTS / "divergence" / "gguf.json"),
        },
        techniques / "prompt_caches.md": {"results": prompt_caches.tables(RESULTS / "prompt_caches")},
        techniques / "kv_runahead.md": {
            "ways": parallel_tables.measured(RESULTS / "parallel"),
            "simulated": parallel_tables.simulated(RESULTS / "parallel"),
        },
        techniques / "low_bit_communication.md": {"wires": parallel_tables.wires(RESULTS / "parallel")},
        docs / "models.md": {
            "speed": family_tables.tables(RESULTS / "families"),
            "truth": truth_table.tables(RESULTS / "truth"),
        },
        docs / "serving.md": {"hostile": hostile_tables.tables(RESULTS / "serving" / "hostile.json")},
        CARD: {"quality": bars.card(QUALITY)},
        MIXTURE: {"quality": bars.card(QUALITY / "moe", "quality/moe")},
        SUMMARISER: {"quality": beam_quality.tables(RESULTS / "beams" / "quality.json")},
    }
    return {path: fill_file(path, blocks) for path, blocks in parts.items()}


def main(args: list[str]) -> int:
    """Write the pages, or with ``--check`` name those that are out of date; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are out of date")
    check = parser.parse_args(args).check
    try:
        results = read_results(DECODE)
        stale = settle(wanted(results), check=check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: python -m benchmarks.report' if check else 'written'}")
    if results and not check:
        for path in plots.draw([(result.title, result.runs) for result in results], IMAGES):
            print(f"{path.relative_to(ROOT)} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

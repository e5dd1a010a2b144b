"""Measure greedy decoding with and without a screened head: ``python -m benchmarks.screened run MODEL --json FILE``.

One engine for each pair of format and head answers the packaged prompts in turns, in an order that is drawn anew for
every prompt. The report has the speed of decoding of each, the ratio of the screened head to the whole one (median over
prompts and repeats), the share of outputs that were computed from the head itself, and whether all token ids are equal.

``noise SRC OUT`` copies a checkpoint and adds to each weight of its matrices uniform noise of half a step of a four-bit
grid (32 inputs of an output share a step). Weights that were rounded to four bits once, such as those of a GGUF file,
are easier to quantize than the weights of most checkpoints; the copy is not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vivace
from benchmarks.result_files import write_report
from vivace.engine import Engine
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.prompts import packaged_prompts

GROUP = 32
"""Inputs that share a step of the four-bit grid."""
LEVELS = 15
"""Steps of a four-bit grid."""


def noisy(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return a matrix (out, in) with uniform noise of half a step added; others are returned as they are."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        return weight
    groups = weight.float().unflatten(1, (-1, GROUP))
    step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / LEVELS
    noise = torch.rand(groups.shape, generator=generator) - 0.5
    return (groups + step * noise).flatten(1).to(weight.dtype)


def add_noise(source: Path, out: Path) -> None:
    """Write a copy of a checkpoint folder whose matrices are ``noisy``."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    for path in sorted(source.glob("*.safetensors")):
        tensors = {name: noisy(weight, generator) for name, weight in load_file(path).items()}
        save_file(tensors, out / path.name, metadata={"format": "pt"})


def share_of(engine: Engine) -> float | None:
    """Return the share of the head's outputs that were computed, or None for a head without a screen."""
    screen = getattr(engine.model.lm_head, "screen", None)
    return None if screen is None else screen.share


def measure(path: Path, formats: list[str], *, limit: int, tokens: int, repeats: int, kernels: str) -> dict[str, Any]:
    """Decode with every combination of format and head, in turns; see the module."""
    engines = {
        (weights, is_screened): vivace.load(
            path, dtype="bfloat16", weights=weights, kernels=kernels, screened_head=is_screened
        )
        for weights in formats
        for is_screened in (False, True)
    }
    prompts = [prompt.request for name in ("e2e", "sql") for prompt in packaged_prompts(name)[: limit // 2]]
    settings: dict[str, Any] = {"method": "plain", "max_new_tokens": tokens, "ignore_eos": True, "do_sample": False}
    speeds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    draws, num_different = random.Random(0), 0
    for engine in engines.values():
        engine.generate(prompts[0], raw=True, **settings)
    with watched_others() as others:
        for _ in range(repeats):
            for prompt in prompts:
                ids = set()
                for key in draws.sample(sorted(engines), len(engines)):
                    (result,) = engines[key].generate(prompt, raw=True, **settings)
                    speeds[key].append(result.stats.tokens_per_s)
                    ids.add(result.token_ids)
                num_different += len(ids) > 1
    rows = []
    for weights in formats:
        whole, screened = speeds[weights, False], speeds[weights, True]
        ratios = sorted(fast / slow for slow, fast in zip(whole, screened, strict=True))
        tenth = len(ratios) // 10
        screened_engine = engines[weights, True]
        rows.append(
            {
                "weights": weights,
                "tokens_per_s": statistics.median(whole),
                "tokens_per_s_screened": statistics.median(screened),
                "ratio": statistics.median(ratios),
                "ratio_spread": [ratios[tenth], ratios[-1 - tenth]],
                "share_computed": share_of(screened_engine),
                "bytes": engines[weights, False].memory.held_bytes,
                "bytes_screened": screened_engine.memory.held_bytes,
            }
        )
    some = engines[formats[0], True]
    setting = {
        "model": path.name, "vocab_size": some.model.config.vocab_size, "width": some.model.config.width,
        "kernels": some.kernels.name, "num_prompts": len(prompts), "new_tokens": tokens, "repeats": repeats,
        "others_cpu_share": others.cpu_share,
    }  # fmt: skip
    return {"setting": setting, "num_different": num_different, "rows": rows}


def main() -> None:
    """Make a noisy copy, or measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    copied = commands.add_parser("noise", help="copy a checkpoint with noise on its weights")
    copied.add_argument("source", type=Path)
    copied.add_argument("out", type=Path)
    measured = commands.add_parser("run", help="measure")
    measured.add_argument("model", type=Path, nargs="+")
    measured.add_argument("--weights", default="bf16,exact12", help="formats of the other matrices")
    measured.add_argument("--limit", type=int, default=20, help="prompts, half of each packaged set")
    measured.add_argument("--tokens", type=int, default=64)
    measured.add_argument("--repeats", type=int, default=3)
    measured.add_argument("--kernels", default="auto")
    measured.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.command == "noise":
        add_noise(asked.source, asked.out)
        return
    origin, reports = asdict(provenance(torch.device("cpu"))), []
    for path in asked.model:
        how = {"limit": asked.limit, "tokens": asked.tokens, "repeats": asked.repeats, "kernels": asked.kernels}
        reports.append(measure(path, asked.weights.split(","), **how))
        print(json.dumps(reports[-1], indent=1), flush=True)
    if asked.json is not None:
        write_report(asked.json, {"provenance": origin, "reports": reports})


if __name__ == "__main__":
    main()

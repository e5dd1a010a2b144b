"""Measure decoding with LoRAs: ``python -m benchmarks.adapters MODEL --count 8 --rank 16 --json FILE``.

The LoRAs have random factors on every matrix of every layer, so small that the texts make sense; their values do not
change how long a pass takes. In turns, in an order that is drawn anew for every repeat, one engine decodes

* one request on the base, and one with a LoRA,
* as many requests as there are LoRAs on the base, in one batch,
* the same with a LoRA each, in one batch and one after another.

The report has the tokens per second of each after the first token, their ratios (median over repeats), and how many
texts of the batch differ from those written one after another, which must be none. ``--peft`` measures PEFT's mixed
batch (``adapter_names``) in transformers beside it, in the same precision; it needs PEFT. ``--llama-cpp`` measures
llama.cpp, which wears one LoRA at a time, on the nearest weights that it has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import vivace
from benchmarks.adapter_peers import llama_cpp_speeds, peft_speed
from benchmarks.result_files import write_report
from vivace.adapters.lora import table_of
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.peft import TENSORS, save_lora
from vivace.core.low_rank import ATTENTION, PROJECTIONS, site_shapes
from vivace.engine import Engine
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes
from vivace.prompts import packaged_prompts

SIZE = 0.01
"""Standard deviation of the up factors."""


def make_loras(model: Path, folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Write LoRAs with random factors for a checkpoint; return their folders by name."""
    decoder = load_decoder(model)
    sites = ATTENTION if decoder.config.moe is not None else PROJECTIONS
    shapes = site_shapes(decoder.config, range(decoder.config.num_layers), dict.fromkeys(sites, rank))
    made = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        factors = {
            site: (
                torch.randn(low, wide, generator=generator) / wide**0.5,
                torch.randn(out, low, generator=generator) * SIZE,
            )
            for site, (wide, low, out) in shapes.items()
        }
        made[f"lora-{number}"] = folder / f"lora-{number}"
        table = table_of(model, decoder)
        save_lora(made[f"lora-{number}"], factors, table, base=base_hash(model), dtype=torch.bfloat16)
    return made


def factor_bytes(lora: Path) -> int:
    """Return the bytes of a LoRA's factors, which a pass of its request reads beside the base."""
    return sum(value.nbytes for value in load_file(lora / TENSORS).values())


class Contest:
    """Ways to decode the same prompts with one engine."""

    def __init__(self, engine: Engine, prompts: Sequence[str], names: Sequence[str], method: str, tokens: int) -> None:
        """Decode ``prompts``, each with the LoRA of the same place, ``tokens`` new tokens each."""
        self.engine = engine
        self.prompts = list(prompts)
        self.names = list(names)
        self.settings: dict[str, Any] = {
            "method": method, "max_new_tokens": tokens, "ignore_eos": True, "do_sample": False, "raw": True,
        }  # fmt: skip
        self.texts: dict[str, list[tuple[int, ...]]] = {}

    def ways(self) -> dict[str, list[tuple[list[str], list[str | None]]]]:
        """Return, by way, the calls that it consists of: prompts and adapters."""
        every = list(zip(self.prompts, self.names, strict=True))
        return {
            "one on the base": [(self.prompts[:1], [None])],
            "one with a LoRA": [(self.prompts[:1], [self.names[0]])],
            "all on the base": [(self.prompts, [None] * len(every))],
            "all with LoRAs": [(self.prompts, [name for _, name in every])],
            "one after another": [([prompt], [name]) for prompt, name in every],
        }

    def speed(self, way: str) -> float:
        """Decode once in a way; return the tokens per second after the first tokens."""
        results = []
        seconds = 0.0
        for prompts, adapters in self.ways()[way]:
            found = self.engine.generate(prompts, adapter=adapters, **self.settings)
            seconds += max(result.stats.decode_s for result in found)
            results += found
        self.texts[way] = [result.token_ids for result in results]
        return sum(result.stats.num_tokens - result.stats.num_first_tokens for result in results) / seconds


def measure(model: Path, weights: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one format of the base's matrices; see the module."""
    prompts = [str(prompt.request) for prompt in packaged_prompts("e2e")[: asked.count]]
    speeds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        loras = make_loras(model, Path(folder), asked.count, asked.rank)
        read_bytes = factor_bytes(next(iter(loras.values())))
        engine = vivace.load(model, dtype="bfloat16", weights=weights, kernels=asked.kernels, adapters=loras)
        contest = Contest(engine, prompts, list(loras), asked.method, asked.tokens)
        draws, ways = random.Random(0), list(contest.ways())
        for way in ways:
            contest.speed(way)
        with watched_others() as others:
            for _ in range(asked.repeats):
                for way in draws.sample(ways, len(ways)):
                    speeds[way].append(contest.speed(way))
        theirs = peft_speed(model, loras, prompts, asked) if asked.peft else None
        llama_cpp = llama_cpp_speeds(model, weights, loras, prompts, asked) if asked.llama_cpp else None
    alone, together = contest.texts["one after another"], contest.texts["all with LoRAs"]
    pairs = {
        "one": ("one with a LoRA", "one on the base"),
        "all": ("all with LoRAs", "all on the base"),
        "batch": ("all with LoRAs", "one after another"),
    }
    return {
        "setting": {
            "model": model.name, "weights": weights, "method": asked.method, "count": asked.count, "rank": asked.rank,
            "new_tokens": asked.tokens, "repeats": asked.repeats, "kernels": engine.kernels.name,
            "adapter_bytes": engine.adapters.num_bytes, "base_bytes": engine.num_bytes,
            "pass_bytes": pass_bytes(engine.model), "factor_bytes": read_bytes,
            "others_cpu_share": others.cpu_share,
        },
        "tokens_per_s": {way: statistics.median(found) for way, found in speeds.items()},
        "ratios": {
            name: statistics.median(fast / slow for fast, slow in zip(speeds[one], speeds[other], strict=True))
            for name, (one, other) in pairs.items()
        },
        "num_different": sum(one != other for one, other in zip(alone, together, strict=True)),
        "peft_tokens_per_s": theirs,
        "llama_cpp_tokens_per_s": llama_cpp,
    }  # fmt: skip


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="+")
    parser.add_argument("--weights", default="bf16", help="formats of the base's matrices")
    parser.add_argument("--count", type=int, default=8, help="LoRAs, and requests at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--method", default="plain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--peft", action="store_true", help="measure PEFT's mixed batch, too")
    parser.add_argument("--llama-cpp", action="store_true", help="measure llama.cpp with these LoRAs, too")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    origin, reports = asdict(provenance(torch.device("cpu"))), []
    for model in asked.model:
        for weights in asked.weights.split(","):
            reports.append(measure(model, weights, asked))
            print(json.dumps(reports[-1], indent=1), flush=True)
    if asked.json is not None:
        write_report(asked.json, {"provenance": origin, "reports": reports})


if __name__ == "__main__":
    main()

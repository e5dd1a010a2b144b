"""Reading a long prompt in full beside llama.cpp and transformers: ``python -m benchmarks.prefill_peers MODEL``.

All systems have the same weights in the checkpoint's dtype (transformers: its faster one), the same tokens and threads,
and read prompts in turns; the first reading of each is not timed. The time of our reading is divided by a fit over the
lengths, ``seconds = a n + b n^2``: the part that grows with the number of tokens is that of the matrices, and its rate
is given as a share of the rate of PyTorch's product of large matrices, in its faster dtype, on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.others import watched_others
from vivace.evaluate.peers import HEAT_PROMPTS, peer_systems
from vivace.evaluate.provenance import provenance
from vivace.prefill.reading_time import ReadingTime

NAMES = ("llama.cpp", "transformers")
PEAK_SHAPES = ((1024, 1536, 1536), (2048, 2048, 2048), (256, 576, 3072))
"""Rows, inputs and outputs of the products that show what PyTorch reaches."""


def peak_flops(seconds: float = 1.0) -> float:
    """Return the operations a second of PyTorch's product of matrices, the best of three shapes and two dtypes.

    Where the processor has no products of bfloat16, float32 is the faster of the two.
    """
    best = 0.0
    for dtype, (rows, inner, columns) in product((torch.bfloat16, torch.float32), PEAK_SHAPES):
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        a @ b
        count, started = 0, time.perf_counter()
        while time.perf_counter() < started + seconds / 6:
            a @ b
            count += 1
        best = max(best, 2 * rows * inner * columns * count / (time.perf_counter() - started))
    return best


def matrix_flops(engine: Engine) -> float:
    """Return the operations of the layers' matrices for one token, two for each number."""
    c = engine.model.config
    heads = c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return 2.0 * c.num_layers * (heads + 3 * c.width * c.ffn_width)


def measure(engine: Engine, folder: Path, lengths: Sequence[int], compared: int, repeats: int) -> dict[str, Any]:
    """Return seconds by system and length, and the fit."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, engine.model.config.vocab_size - 100, (max(lengths) + 1,), generator=draws).tolist()

    def ours(length: int) -> float:
        started = time.perf_counter()
        engine.generate(tokens[:length], method="plain", max_new_tokens=1, ignore_eos=True)
        return time.perf_counter() - started

    long = BenchmarkPrompt("", tuple(tokens[:compared]))
    short = BenchmarkPrompt("", tuple(tokens[:256]))
    asked = [*[short] * HEAT_PROMPTS, long]
    peers, heat = peer_systems(NAMES, folder, asked, max_new_tokens=1, device=torch.device("cpu"))
    ours(min(lengths))
    by_length = {length: [ours(length) for _ in range(repeats)] for length in lengths if length != compared}
    times: dict[str, list[float]] = {"vivace": [], **{peer.name: [] for peer in peers}}
    for turn in range(repeats + 1):
        own = ours(compared)
        rest = {peer.name: peer.answer([long]).total_s for peer in peers}
        if turn:
            times["vivace"].append(own)
            for name, seconds in rest.items():
                times[name].append(seconds)
    by_length[compared] = times["vivace"]
    medians = {length: statistics.median(seconds) for length, seconds in by_length.items()}
    fit = ReadingTime.fit(medians)
    assert fit is not None, "one length is compared, and others are read beside it"
    peak = peak_flops()
    return {
        "compared": compared,
        "times": times,
        "dtype": None if heat is None else heat.dtype,
        "by_length": {str(length): value for length, value in by_length.items()},
        "peak_flops": peak,
        "matrices_share_of_peak": matrix_flops(engine) / fit.by_token / peak,
        "attention_share": {str(length): fit.square_share(length) for length in sorted(medians)},
    }


def tables(folder: Path) -> str:
    """Return the tables of all committed runs."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    found, setting = written["found"], written["setting"]
    head = f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}"
    caption = f"{head}; {setting['model']}, a prompt of {found['compared']:,} tokens, in turns."
    medians = {name: statistics.median(seconds) for name, seconds in found["times"].items()}
    names = {"transformers": f"transformers, {found['dtype']}", "llama.cpp": "llama.cpp, bfloat16"}
    rows = [
        (names.get(name, name), f"{1e3 * value:,.0f} ms", f"{value / medians['vivace']:.2f}")
        for name, value in medians.items()
    ]
    return [caption, table(("system", "first token", "beside vivace"), rows), _lengths(found)]


def _lengths(found: Mapping[str, Any]) -> str:
    """Return the table by length, and what the matrices reach."""
    rows = [
        (f"{int(length):,}", f"{1e3 * statistics.median(seconds):,.0f} ms", f"{found['attention_share'][length]:.0%}")
        for length, seconds in sorted(found["by_length"].items(), key=lambda pair: int(pair[0]))
    ]
    reached = f"{found['matrices_share_of_peak']:.0%} of {found['peak_flops'] / 1e9:,.0f} GFLOP/s"
    listed = table(("prompt tokens", "full reading", "of it grows with the square"), rows)
    return f"{listed}\n\nWhat grows with the number of tokens reaches {reached}, PyTorch's product of matrices."


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="1024,4000,8000")
    parser.add_argument("--compared", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    engine = vivace.load(asked.model)
    lengths = [int(length) for length in asked.lengths.split(",")]
    with watched_others() as others:
        found = measure(engine, Path(asked.model), lengths, asked.compared, asked.repeats)
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        setting: dict[str, Any] = {"model": Path(asked.model).name, "kernels": engine.kernels.name}
        setting["others_cpu_share"] = others.cpu_share
        written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "found": found}
        write_report(asked.json, written)


if __name__ == "__main__":
    main()

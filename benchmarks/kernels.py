"""Times native bodies beside torch: single products over rows, and whole passes of models with random weights.

Run it on a machine with nothing else to do:

    python benchmarks/kernels.py --out kernels.json

Sizes and bodies take turns within a repeat, so that a drifting clock hits them alike. Bandwidth stands beside the
best that a plain read reaches here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.packed import pack_decoder
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes, pass_seconds, read_bandwidth
from vivace.kernels import reference
from vivace.kernels.library import BODIES, open_library, runnable
from vivace.kernels.native import Matrix, NativeBody, pack

ROWS = (1, 2, 4, 5, 8, 9, 16)
SHAPES = {"256x1024": (256, 1024), "768x2048": (768, 2048), "2048x960": (2048, 960), "1024x32000": (1024, 32000)}
"""in x out."""

MODELS: dict[str, dict[str, Any]] = {
    "14M": {"width": 320, "num_layers": 10, "num_heads": 5, "num_kv_heads": 5, "ffn_width": 832, "vocab_size": 4096},
    "100M": {"width": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "ffn_width": 2048},
    "360M": {"width": 960, "num_layers": 32, "num_heads": 15, "num_kv_heads": 5, "ffn_width": 2560},
}
"""Llama-like, D = 64, tied head; a vocabulary of 16384 unless said."""


def main() -> None:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", default="14M,100M,360M")
    options = parser.parse_args()
    library = open_library()
    bodies = {name: NativeBody(name, library) for name in BODIES if name in runnable(library)}
    with torch.inference_mode():
        result = {
            "provenance": asdict(provenance(torch.device("cpu"))),
            "read_bytes_per_s": read_bandwidth(torch.device("cpu")),
            "products": {name: product(*shape, bodies, options.repeats) for name, shape in SHAPES.items()},
            "models": {
                name: {body: model(name, bodies.get(body), options.repeats) for body in ("torch", *bodies)}
                for name in options.models.split(",")
            },
        }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(result)


def product(in_width: int, out_width: int, bodies: dict[str, NativeBody], repeats: int) -> dict[str, dict[int, float]]:
    """Median seconds of one product by body and number of rows; weights come from memory, not from a cache."""
    copies = max(1, (1 << 27) // (2 * in_width * out_width))
    weights = [torch.randn(out_width, in_width).bfloat16() for _ in range(copies)]
    packed = [Matrix(pack(weight), None, in_width, out_width) for weight in weights]
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in ("torch", *bodies)}
    for repeat in range(repeats + 1):
        for rows in ROWS:
            x = torch.randn(rows, in_width).bfloat16()
            works: dict[str, Callable[[int], object]] = {"torch": lambda i, x=x: reference.linear(x, weights[i])}
            works |= {name: partial(_native, body, packed, x) for name, body in bodies.items()}
            for name, work in works.items():
                start = time.perf_counter()
                for index in range(copies):
                    work(index)
                if repeat:
                    times[name][rows].append((time.perf_counter() - start) / copies)
    return {name: {rows: statistics.median(found) for rows, found in by.items()} for name, by in times.items()}


def _native(body: NativeBody, packed: list[Matrix], x: torch.Tensor, index: int) -> object:
    return body.linear(packed[index], x)


def model(name: str, body: NativeBody | None, repeats: int) -> dict[str, Any]:
    """Seconds of a pass over k rows with 128 tokens stored, its greedy choice included."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16384, "head_dim": 64, "max_positions": 512, "tied_head": True, **MODELS[name]}
    decoder = Decoder(ModelConfig(**sizes))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    decoder = decoder.bfloat16().requires_grad_(False).eval()
    if body is not None:
        pack_decoder(decoder, body)
    seconds = pass_seconds(decoder, ROWS, context=128, repeats=repeats)
    return {"weight_bytes": pass_bytes(decoder), "seconds": dict(zip(ROWS, seconds, strict=True))}


def print_tables(result: dict[str, Any]) -> None:
    """Bandwidth at one row and what more rows cost."""
    print(f"plain read: {result['read_bytes_per_s'] / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    for shape, by_body in result["products"].items():
        size = 2 * SHAPES[shape][0] * SHAPES[shape][1]
        for name, seconds in by_body.items():
            _print_line(f"{shape} {name}", size, seconds)
    for model_name, by_body in result["models"].items():
        for name, found in by_body.items():
            _print_line(f"{model_name} {name}", found["weight_bytes"], found["seconds"])


def _print_line(title: str, size: int, seconds: dict[int, float]) -> None:
    cost = "  ".join(f"{rows}: {seconds[rows] / seconds[1]:.2f}" for rows in ROWS[1:])
    print(f"{title:20} {seconds[1] * 1e6:9.1f} us {size / seconds[1] / 1e9:6.1f} GB/s   {cost}")


if __name__ == "__main__":
    main()

"""Time passes over 1 to 16 rows: how close to memory bandwidth a pass over one row is, and what more rows cost.

Run it on a machine that does nothing else:

    python -m benchmarks.kernels --models shipped,twin,100M,360M --weights bf16,exact12 --out kernels.json

All models, numbers of rows and the two measures of memory take turns within a repeat, so that a changing clock rate
affects them alike. The first measure is PyTorch's sum of a buffer, the second the fastest way we know to read weights:
one row times one packed matrix far larger than any cache. A model's bandwidth is the bytes of its weights over the time
of its pass over one row, greedy choice included; ``verify(k)`` is shown in milliseconds and in units of that pass. A
token is one of plain decoding in a session, everything included. Models of 100 and 360 million parameters have random
weights, which take as long to read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import SHAPES
from benchmarks.result_files import write_report
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.widen import widen
from vivace.core.config import ModelConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.decode.multi_step import MultiStepPlain
from vivace.decode.request import Emitted, Request
from vivace.decode.session import Session
from vivace.engine import SHIPPED
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes, passes_over
from vivace.kernels.choice import choose
from vivace.kernels.low_bit import Weights, check_weights
from vivace.kernels.native import Matrix, NativeBody, pack

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of rows that are measured."""
SHOWN = (2, 4, 8, 16)
"""Numbers of rows in the printed table."""
CONTEXT = 128
"""Number of tokens in the cache."""
LONGEST = 1024
TOKEN = -1
"""Stands among the numbers of rows for a token of plain decoding."""
MODELS = ("shipped", "twin", *SHAPES)
READ = (1024, 131072)
"""in x out of the matrix that is read to measure memory: 256 MiB."""


def main() -> None:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--weights", default="bf16", help="formats of matrices; all models in each")
    parser.add_argument("--kernels", default="auto", help="auto, avx2, avx512 or amx")
    options = parser.parse_args()
    choice = choose(options.kernels)
    if choice.body is None:
        parser.error(f"there is nothing to measure: {choice.reason}")
    with torch.inference_mode():
        result = {
            "provenance": asdict(provenance(torch.device("cpu"))),
            "kernels": choice.name,
            "threads": torch.get_num_threads(),
            **measure(options.models.split(","), options.weights.split(","), choice.body, options.repeats),
        }
    write_report(options.out, result)
    print_tables(result)


def measure(models: list[str], formats: list[str], body: NativeBody, repeats: int) -> dict[str, Any]:
    """Return median and best seconds of every pass, and the best bandwidth of both measures of memory."""
    reads = _reads(body)
    kinds = [check_weights(name) for name in formats]
    decoders = {_named(model, kind): _decoder(model, kind, body) for model in models for kind in kinds}
    names = list(decoders)
    passes = {name: passes_over(decoder, ROWS, context=CONTEXT) for name, decoder in decoders.items()}
    works: dict[tuple[str, int], Callable[[], object]] = {(name, 0): read for name, (read, _) in reads.items()}
    works |= {(name, rows): run for name in names for rows, run in zip(ROWS, passes[name], strict=True)}
    works |= {(name, TOKEN): _tokens(decoder) for name, decoder in decoders.items()}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            start = time.perf_counter()
            made = work()
            if repeat:
                times[key].append((time.perf_counter() - start) / (len(made) if isinstance(made, list) else 1))
    return {
        "read_bytes_per_s": {name: size / min(times[name, 0]) for name, (_, size) in reads.items()},
        "models": {
            name: {
                "weight_bytes": pass_bytes(decoders[name]),
                "seconds": {str(rows): statistics.median(times[name, rows]) for rows in ROWS},
                "best_seconds": {str(rows): min(times[name, rows]) for rows in ROWS},
                "token_seconds": statistics.median(times[name, TOKEN]),
            }
            for name in names
        },
    }


def _tokens(decoder: Decoder) -> Callable[[], list[Emitted]]:
    """Return a function that decodes a few tokens plainly after a context, at every call; a text that is at its end
    begins anew.
    """
    session = Session(decoder, num_slots=1, capacity=LONGEST)

    def begin() -> None:
        session.admit(Request(tuple(range(1, CONTEXT + 1)), LONGEST - CONTEXT, MultiStepPlain(decoder)))
        for _ in range(4):  # the prompt, the first token, and how long a pass takes
            session.step()

    def step() -> list[Emitted]:
        if session.is_idle:
            begin()
        return session.step()

    begin()
    return step


def _reads(body: NativeBody) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what measures memory: a function and the bytes it reads."""
    in_width, out_width = READ
    weight = torch.randn(out_width, in_width, dtype=torch.bfloat16)
    matrix = Matrix(pack(weight), None, in_width, out_width)
    row = torch.randn(1, in_width).bfloat16()
    buffer = torch.ones(in_width * out_width // 2)
    size = 2 * in_width * out_width
    return {"tensor.sum": (buffer.sum, size), "one row": (lambda: body.linear(matrix, row), size)}


def _named(model: str, weights: Weights) -> str:
    """Return the name of a model in a weight format."""
    return model if weights == "bf16" else f"{model} {weights}"


def _decoder(name: str, weights: Weights, body: NativeBody) -> Decoder:
    """Load or make a model and pack it."""
    if name in ("shipped", "twin"):
        decoder = load_decoder(SHIPPED, dtype="bfloat16", device="cpu")
        decoder = decoder if name == "shipped" else widen(decoder, 4)
    else:
        decoder = _random_llama(SHAPES[name])
    pack_decoder(decoder, body, weights)
    return decoder


def _random_llama(shape: dict[str, int]) -> Decoder:
    """Make a decoder with random weights."""
    config = ModelConfig(
        vocab_size=shape["vocab_size"],
        width=shape["hidden_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        ffn_width=shape["intermediate_size"],
        max_positions=512,
        tied_head=True,
    )
    decoder = Decoder(config).bfloat16().requires_grad_(False).eval()
    torch.manual_seed(0)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return decoder


def print_tables(result: dict[str, Any]) -> None:
    """Print bandwidth at one row and the cost of more rows, from medians and below from the best repeats."""
    reads = result["read_bytes_per_s"]
    best = max(reads.values())
    shown = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in reads.items())
    print(f"reading, GB/s: {shown}; {result['kernels']}, {result['threads']} threads")
    header = f"{'a token':>12}" + "".join(f"{f'verify({rows})':>20}" for rows in SHOWN)
    print(f"{'model':14}{'weights':>10}{'decode(1)':>12}{'GB/s':>7}{'of best':>9}{header}")
    for name, found in result["models"].items():
        print_line(name, found["weight_bytes"], found["seconds"], best, found["token_seconds"])
        print_line("  best", found["weight_bytes"], found["best_seconds"], best)


def print_line(name: str, size: int, seconds: dict[str, float], best: float, token: float | None = None) -> None:
    """Print the line of one model."""
    one = seconds["1"]
    costs = "".join(f"{seconds[str(k)] * 1e3:9.2f} ms {seconds[str(k)] / one:5.2f} x" for k in SHOWN)
    costs = f"{token * 1e3:9.2f} ms{costs}" if token else f"{'':12}{costs}"
    speed = size / one
    print(f"{name:14}{size / 1e6:7.1f} MB{one * 1e3:9.2f} ms{speed / 1e9:7.1f}{speed / best:9.0%}{costs}")


if __name__ == "__main__":
    main()

"""What the machine allows: every pass reads all weights, so memory bandwidth limits the speed of decoding.

Decoding one token reads all weights, so ``tokens/s <= bandwidth / weight bytes``. A pass over k rows reads them
once too, and the ratio of its time to that of a pass over one row, ``verify(k) / decode(1)``, limits what drafting can
gain. All three are measured here, on the model and with the threads that the benchmark uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.decode.forward import ForwardPass

MAX_ROWS = 16
"""Largest number of rows whose pass is measured."""


@dataclass(frozen=True)
class Roofline:
    """Limits of one model on one machine."""

    read_bytes_per_s: float
    """Memory bandwidth, measured on a buffer far larger than any cache."""
    weight_bytes: int
    """Bytes that a pass reads: all weights except the rows of the embedding that are not looked up."""
    decode_s: float
    """Median seconds of a pass over one row."""
    verify_cost: tuple[float, ...]
    """Median time of a pass over k = 1..16 rows, in units of ``decode_s``."""

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bytes of weights over the time of a pass over one row."""
        return self.weight_bytes / self.decode_s


def measure_roofline(model: Decoder, *, context: int = 128, repeats: int = 9) -> Roofline:
    """Measure bandwidth and passes.

    Args:
        model: the decoder.
        context: number of tokens in the cache during the passes.
        repeats: number of measurements per median.
    """
    seconds = pass_seconds(model, range(1, MAX_ROWS + 1), context=context, repeats=repeats)
    return Roofline(
        read_bytes_per_s=read_bandwidth(model.device),
        weight_bytes=pass_bytes(model),
        decode_s=seconds[0],
        verify_cost=tuple(value / seconds[0] for value in seconds),
    )


def read_bandwidth(device: torch.device, *, num_bytes: int = 1 << 28, repeats: int = 7) -> float:
    """Return the bytes per second of summing a buffer, the best of a few runs."""
    buffer = torch.ones(num_bytes // 4, device=device)
    return num_bytes / min(timed(buffer.sum, device, repeats + 1)[1:])


@torch.inference_mode()
def pass_seconds(model: Decoder, num_rows: Sequence[int], *, context: int, repeats: int) -> list[float]:
    """Return the median time of a target pass and its greedy choice for each number of rows; the sizes take turns."""
    passes = passes_over(model, num_rows, context=context)
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats + 1):
        for run, found in zip(passes, times, strict=True):
            found += timed(run, model.device)
    return [statistics.median(found[1:]) for found in times]


@torch.inference_mode()
def passes_over(model: Decoder, num_rows: Sequence[int], *, context: int) -> list[Callable[[], object]]:
    """Return a target pass with its greedy choice for each number of rows, to be called repeatedly in inference mode.

    Args:
        model: the decoder.
        num_rows: number of rows of each pass.
        context: number of tokens in the cache, the same in every call.
    """
    cache = model.new_cache(1, context + max(num_rows) + 1)
    forward = ForwardPass()
    prompt = Draft.committed_only({0: [1] * context}, device=cache.device)
    forward.run(model, prompt, cache, chunk=True)
    cache.commit([0], [range(context)])
    drafts = [Draft.committed_only({0: [1] * rows}, device=cache.device) for rows in num_rows]
    return [partial(run_pass, model, forward, draft, cache) for draft in drafts]


def pass_bytes(model: Decoder) -> int:
    """Return the bytes of weights that a pass reads: without tables that are looked up, with all experts of a
    mixture.
    """
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    table = [model.embedding] if model.embedding_rows is None else model.embedding_rows.parameters()
    looked_up = 0 if model.config.tied_head else sum(part.nbytes for part in table)
    looked_up += 0 if model.position_embedding is None else model.position_embedding.nbytes
    return sum(weights.values()) - looked_up


def run_pass(model: Decoder, forward: ForwardPass, draft: Draft, cache: KVCache) -> None:
    """Run a target pass over a draft and take its greedy choices."""
    model.greedy(forward.run(model, draft, cache).hidden)


def timed(work: Callable[[], object], device: torch.device, count: int = 1) -> list[float]:
    """Return the seconds of each of a number of runs, waiting for the accelerator to finish."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def matrix_rate(device: torch.device, dtype: torch.dtype, width: int, *, rows: int = 512, repeats: int = 3) -> float:
    """Return the operations per second of a product of ``rows`` rows with a square matrix, the best of a few runs."""
    width = min(width, 4096)
    x, matrix = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, width), (width, width)))
    return 2 * rows * width**2 / min(timed(lambda: x @ matrix.mT, device, repeats + 1)[1:])

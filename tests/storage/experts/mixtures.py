"""Tiny mixtures of experts as transformers writes them, and stores of their experts in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.expert_policies import LeastRecent, OnDemand, Oracle, Static
from benchmarks.expert_traces import Trace
from tests.decode.runs import Result, finish
from vivace.checkpoint.load import load_decoder
from vivace.core.layers import FeedForward
from vivace.core.model import Decoder
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Traversal
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.experts.parts import CachedParts
from vivace.storage.experts.policy import Key, NextUse, Policy
from vivace.storage.experts.store import feed_forward_over
from vivace.storage.io.thread_reader import ThreadAsyncReader

FAMILIES = ("mixtral", "olmoe", "qwen3_moe")
PROMPTS = ((5, 17, 42, 8, 23, 23, 71), tuple(range(3, 60)))


class MemoryExperts:
    """Fills ``ExpertStore`` with the experts of a resident model, and reads their bytes; may be slow or broken."""

    def __init__(self, model: Decoder, delay_s: Callable[[], float] | None = None) -> None:
        self.config, self.dtype = model.config, model.dtype
        assert model.config.moe is not None
        width = model.config.moe.expert_width
        self.shapes = (2 * width, model.config.width), (model.config.width, width)
        self.expert_bytes = 3 * width * model.config.width * model.dtype.itemsize
        self.delay_s = delay_s
        self.broken: set[Key] = set()
        self.asked: list[Key] = []
        self.reads: list[tuple[Key, int, int]] = []
        self.lock = threading.Lock()
        self.bundles: dict[Key, bytes] = {}
        """In the order of their places."""
        for index, layer in enumerate(model.layers):
            if isinstance(layer.feed_forward, MixtureOfExperts):
                for number, expert in enumerate(layer.feed_forward.experts):  # type: ignore[arg-type]
                    self.bundles[index, number] = _bytes(expert)

    def offset(self, key: Key) -> int:
        return list(self.bundles).index(key) * self.expert_bytes

    def open_reader(self, *, num_threads: int, chunk_bytes: int) -> ThreadAsyncReader:
        return ThreadAsyncReader(self, num_threads=num_threads, chunk_bytes=chunk_bytes)  # type: ignore[arg-type]

    def read(self, place: int, into: memoryview) -> None:
        number, first = divmod(place, self.expert_bytes)
        key = list(self.bundles)[number]
        self.asked.append(key)
        if self.delay_s is not None:
            time.sleep(self.delay_s())
        with self.lock:
            self.reads.append((key, first, len(into)))
        if key in self.broken:
            raise OSError(5, "Input/output error")
        into[:] = self.bundles[key][first : first + len(into)]

    def expert(self, memory: Tensor) -> FeedForward:
        split = prod(self.shapes[0])
        parts = memory.view(self.dtype).split([split, prod(self.shapes[1])])
        return feed_forward_over(
            self.config, *(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        )

    @property
    def num_bytes(self) -> int:
        return sum(count for *_, count in self.reads)


def _bytes(expert: FeedForward) -> bytes:
    parts = (expert.up.weight, expert.down.weight)
    return b"".join(bytes(part.detach().contiguous().view(torch.uint8).reshape(-1).tolist()) for part in parts)


def jitter(seed: int, most_s: float = 0.0003) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.random() * most_s


def streamed(folder: Path, cache: ExpertCache, resident: Decoder) -> Decoder:
    """The model of a checkpoint with its experts served by a cache."""
    return load_decoder(folder, dtype=resident.dtype, parts=CachedParts(resident.config, cache))


def answers(model: Decoder, traversal: Traversal | None = None, new_tokens: int = 5) -> list[Result]:
    """Greedy answers to a short and a long prompt, together, with log-probabilities."""
    drafter = NoDrafts()
    if traversal is not None:
        drafter.traversal = traversal
    requests = [Request(prompt, new_tokens, drafter, logprobs=True) for prompt in PROMPTS]
    with torch.inference_mode():
        return finish(Session(model, num_slots=2, capacity=128, chunk=16), requests)


def policies(trace: Trace, num_slots: int) -> Sequence[Policy]:
    """One of each kind."""
    return [
        OnDemand(),
        LeastRecent(),
        Static.of(trace, num_slots),
        NextUse(trace.num_layers, trace.num_experts, "next_layer"),
        Oracle(trace),
    ]

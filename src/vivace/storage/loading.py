"""A store and a budget in, a decoder out: what is resident is read now, the rest when its layer runs."""

from __future__ import annotations

import ctypes
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vivace.checkpoint.load import put
from vivace.core.cpu.backend import CpuBackend
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.decode.session import DRAFT_SLACK
from vivace.errors import CapacityError, CorruptError, UnsupportedError
from vivace.kernels.native import NativeBody
from vivace.storage.budget import MemoryPlan, memory_gb_per_s, plan_memory
from vivace.storage.checksums import checked, page_sums_of
from vivace.storage.experts import ExpertCache
from vivace.storage.experts_parts import CachedParts
from vivace.storage.experts_shelf import StoreShelf
from vivace.storage.neurons import WINDOW, NeuronParts, Neurons
from vivace.storage.policies import NextUse
from vivace.storage.pools import Pool, open_pool, whole
from vivace.storage.probing import Choice, device_bytes, open_reader
from vivace.storage.readers import NUM_THREADS, aligned
from vivace.storage.store import Store, in_rows, open_store
from vivace.storage.streaming import Stream, StreamedParts, put_tiles
from vivace.units import format_bytes

SCATTERED_THREADS = 16
"""Reads of a few KiB under way at once: devices answer each late, and many at a time."""
UNCHECKED = "damage to the file goes unnoticed: it has no checksums of pages, convert the model again to have them"
MAX_TOKENS = 2048
"""Longest text a plan makes room for, where the model would take a longer one."""


@dataclass(frozen=True, eq=False)
class Storage:
    """What stands behind a decoder whose weights are not all in memory."""

    store: Store
    plan: MemoryPlan
    reader: Choice
    pool: Pool
    read_gb_per_s: float | None
    stream: Stream | None = None
    neurons: Neurons | None = None
    experts: ExpertCache | None = None
    expected_tokens_per_s: float | None = None
    body: NativeBody | None = None
    """Runs what does not run on PyTorch."""

    @property
    def report(self) -> str:
        """The plan in a sentence."""
        plan = self.plan
        parts = [f"{format_bytes(plan.num_bytes)} of {format_bytes(plan.budget_bytes or plan.num_bytes)}"]
        if self.stream is not None:
            parts.append(f"{format_bytes(plan.pass_bytes(self.store))} read a pass, ahead of use")
        if self.neurons is not None:
            parts.append(f"{plan.neurons_per_layer} of {self.store.config.ffn_width} neurons a layer in memory")
        if self.experts is not None:
            parts.append(f"{plan.num_experts} of {len(plan.streamed)} experts in memory")
        if self.expected_tokens_per_s is not None:
            parts.append(f"{self.expected_tokens_per_s:.2f} tokens/s expected")
        reader = f"reader {self.reader.reader.name}: {self.reader.why}"
        return "; ".join([", ".join(parts), reader, *([] if self.is_checked else [UNCHECKED])])

    @property
    def is_checked(self) -> bool:
        """Whether all that is read while the model runs is compared with checksums."""
        return self.store.page_sums is not None or not self.plan.streamed

    @property
    def facts(self) -> dict[str, object]:
        """What was planned, and what was read so far, as our counters and the kernel's have it."""
        traffic = self.pool.traffic
        return {
            "budget_bytes": self.plan.budget_bytes,
            "planned_bytes": self.plan.num_bytes,
            "bytes_per_pass": self.plan.pass_bytes(self.store),
            "bytes_per_pass_of_8": self.plan.pass_bytes(self.store, 8),
            "reader": self.reader.reader.name,
            "reader_why": self.reader.why,
            "is_checked": self.is_checked,
            "device_gb_per_s": self.read_gb_per_s,
            "gb_per_s": traffic.gb_per_s,
            "bytes_read": traffic.num_bytes,
            "device_bytes": device_bytes(),
            "wait_s": traffic.wait_s,
            "expected_tokens_per_s": self.expected_tokens_per_s,
        }

    def num_slots(self, wanted: int, capacity: int) -> int:
        """Sequences of ``capacity`` tokens that decode at once: as many as wanted and as the plan has room for.

        Raises:
            CapacityError: not even one.
        """
        if self.plan.budget_bytes is None:
            return wanted
        if capacity > self.plan.num_tokens:
            raise CapacityError(
                f"{capacity} tokens were asked for, this memory has room for the cache of {self.plan.num_tokens}; "
                "give a lower --max-new-tokens (a server: --max-model-len)"
            )
        return min(wanted, (self.plan.num_tokens + DRAFT_SLACK) // (capacity + DRAFT_SLACK))

    def most_tokens(self, wanted: int) -> int:
        """Tokens of one sequence: as many as wanted and as the plan has room for."""
        return wanted if self.plan.budget_bytes is None else min(wanted, self.plan.num_tokens)

    def close(self) -> None:
        """Stop reading and let go of the file; the decoder cannot be used any more."""
        if self.stream is not None:
            self.stream.close()
        if self.experts is not None:
            self.experts.close()
        self.pool.close()
        self.reader.reader.close()


def load_stored(
    folder: str | Path,
    budget_bytes: int | None = None,
    *,
    reader: str = "auto",
    num_tokens: int | None = None,
    window: int = WINDOW,
    body: NativeBody | None = None,
) -> tuple[Decoder, Storage]:
    """The decoder of a store, frozen.

    Args:
        folder: the store.
        budget_bytes: weights, buffers and cache together; None is all in memory.
        reader: "auto", "direct", "buffered" or "mmap".
        num_tokens: longest text, prompt and answer together; None is the model's context, 2048 at most.
        window: tokens whose neurons stay in memory, in a store of neurons.
        body: runs a store whose matrices lie in tiles, and what lies beside neurons, which PyTorch runs; all else that
            is streamed is PyTorch's alone.

    Raises:
        UnsupportedError: tiles, and no body to read them.
        CheckpointError: the store is missing, broken or foreign.
        CapacityError: the budget is too small.
        UsageError: no such reader, or it does not work here.
    """
    store = open_store(folder)
    tokens = min(store.config.max_positions, MAX_TOKENS) if num_tokens is None else num_tokens
    plan = plan_memory(store, budget_bytes, tokens)
    if store.is_tiled and body is None:
        raise UnsupportedError(
            f"{store.folder} was written for native kernels and these are PyTorch's; convert the model with "
            "--kernels torch, or give --kernels auto"
        )
    has_neurons = plan.neurons_per_layer > 0 and store.dtype == torch.bfloat16
    used = body if store.is_tiled or has_neurons else None
    found = open_reader(store.path, reader)
    choice = replace(found, reader=checked(found.reader, store))
    pool = open_pool(choice.reader, num_threads=SCATTERED_THREADS if plan.neurons_per_layer else NUM_THREADS)
    stream, neurons, experts = None, None, None
    parts: DenseParts = DenseParts(store.config)
    if plan.num_experts:
        assert store.config.moe is not None
        experts = ExpertCache(
            StoreShelf(store, choice.reader, used),
            NextUse(store.config.num_layers, store.config.moe.num_experts),
            store.config.num_layers,
            plan.num_experts,
        )
        parts = CachedParts(store.config, experts)
    elif plan.neurons_per_layer:
        neurons = Neurons.of(store, pool, plan, window)
        parts = NeuronParts(store.config, neurons)
    elif plan.streamed:
        stream = Stream(store, pool, plan.streamed)
        parts = StreamedParts(store.config, stream, used)
    backend = None if used is None else CpuBackend(used, joins_layers=stream is None and neurons is None)
    with torch.device("meta"):
        decoder = Decoder(store.config, parts, backend)
    for name in ("resident", *plan.resident):
        for parameter, values in read_bundle(store, pool, name).items():
            if parameter == "selector":
                assert neurons is not None
                neurons.select_by(name, values)
            elif stream is not None and used is not None:
                put_tiles(decoder, parameter, values)
            else:
                put(decoder, parameter, in_rows(values))
    left = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    assert not left, left
    if neurons is not None:
        neurons.body = used
    if backend is not None:
        _pack(decoder, backend)
    speed = choice.gb_per_s
    expected = plan.expected(store, speed, memory_gb_per_s()) if speed is not None and plan.streamed else None
    storage = Storage(store, plan, choice, pool, speed, stream, neurons, experts, expected, used)
    return decoder.requires_grad_(False).eval(), storage


def _pack(decoder: Decoder, backend: CpuBackend) -> None:
    """Hand what is in memory to the backend; no more than a layer is there twice."""
    backend.pack_ends(decoder)
    for index in range(decoder.config.num_layers):
        backend.pack_layer(decoder, index)
        _give_back()
    backend.finish(decoder)


def _give_back() -> None:
    """Freed memory goes back to the system where the C library can be asked: glibc keeps tens of MiB a matrix."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def read_bundle(store: Store, pool: Pool, name: str) -> dict[str, nn.Parameter]:
    """The tensors of a bundle, in memory of their own, compared with its checksum.

    Raises:
        CheckpointError: it cannot be read.
        CorruptError: it is damaged.
    """
    bundle = store[name]
    memory = aligned(bundle.num_pages_bytes)
    pool.submit(*whole(bundle.offset, memory)).wait()
    checksum = bundle.checksum if page_sums_of(pool.reader) else zlib.crc32(memory[: bundle.num_bytes])
    if checksum != bundle.checksum:
        raise CorruptError(
            f"{store.path}: bundle {name} has checksum {checksum:08x}, its index says {bundle.checksum:08x}; "
            "convert the model again"
        )
    content = torch.frombuffer(memory, dtype=torch.uint8)
    return {part: nn.Parameter(values, requires_grad=False) for part, values in store.tensors(name, content).items()}

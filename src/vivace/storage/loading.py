"""Load a decoder from a store within a memory budget: resident weights now, the others whenever their layer runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vivace.checkpoint.files import summary
from vivace.checkpoint.load import least_bytes, put
from vivace.core.cpu.backend import CpuBackend
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.errors import CorruptError, UnsupportedError
from vivace.kernels.heap import trimmer
from vivace.kernels.low_bit import LowBit, size_of
from vivace.kernels.native import NativeBody
from vivace.storage.budget import MemoryPlan, memory_gb_per_s, plan_memory
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.experts.parts import CachedParts
from vivace.storage.experts.policy import NextUse
from vivace.storage.experts.store import StoredExperts
from vivace.storage.io.async_reader import AsyncReader
from vivace.storage.io.checksums import checked, page_sums_of
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.probing import ReaderChoice, device_bytes, open_reader
from vivace.storage.io.readers import NUM_THREADS, aligned
from vivace.storage.neurons.feed_forward import NeuronParts
from vivace.storage.neurons.loader import WINDOW, NeuronLoader
from vivace.storage.store import Store, in_rows, open_store
from vivace.storage.streaming import Stream, StreamedParts, put_tiles
from vivace.units import format_bytes

SCATTERED_THREADS = 16
"""Reads of a few KiB that are kept under way at once: a device answers each late, but many at a time."""
UNCHECKED = "damage to the file goes unnoticed: it has no checksums of pages, convert the model again to have them"
MAX_TOKENS = 2048
"""Longest text that a plan makes room for, unless another length is asked for."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Everything behind a decoder whose weights are not all in memory."""

    store: Store
    plan: MemoryPlan
    reader: ReaderChoice
    """Reads the file, one blocking read at a time."""
    async_reader: AsyncReader
    """Keeps many such reads under way, for layers and neurons; experts have one of their own."""
    read_gb_per_s: float | None
    """Measured speed of the device, 10^9 bytes a second; None where the reader was chosen by name."""
    stream: Stream | None = None
    neurons: NeuronLoader | None = None
    experts: ExpertCache | None = None
    expected_tokens_per_s: float | None = None
    body: NativeBody | None = None
    """Native kernels that run whatever PyTorch does not."""

    @property
    def report(self) -> str:
        """The plan in one line."""
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
        """Return whether everything that is read while the model runs is compared with checksums."""
        return self.store.page_sums is not None or not self.plan.streamed

    @property
    def facts(self) -> dict[str, object]:
        """Return what was planned, and what was read so far by our counters and by the kernel's."""
        traffic = self.async_reader.traffic
        if self.experts is not None:  # experts have a reader of their own, and wait for its reads together
            traffic += replace(self.experts.fetches.reader.traffic, wait_s=self.experts.counts.wait_s)
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

    @property
    def held_bytes(self) -> int:
        """Memory of weights and buffers; what the plan leaves beside them is for texts."""
        return self.plan.num_bytes - self.plan.cache_bytes - self.plan.beside_bytes

    def close(self) -> None:
        """Stop reading and close the file; the decoder cannot be used any more."""
        if self.stream is not None:
            self.stream.close()
        if self.experts is not None:
            self.experts.close()
        self.async_reader.close()
        self.reader.reader.close()


def bytes_beside(store: Path, draft_model: str | Path | None, adapters: Iterable[str | Path]) -> int:
    """Memory that a draft model and adapters will take; twice an adapter's file, since some are laid out anew."""
    folders = {*map(Path, adapters), *(store / "adapters").glob("*")}
    files = [file.stat().st_size for folder in folders for file in folder.glob("*.safetensors")]
    return 2 * sum(files) + (0 if draft_model is None else least_bytes(draft_model) * 21 // 20)


def load_stored(
    folder: str | Path,
    budget_bytes: int | None = None,
    *,
    reader: str = "auto",
    num_tokens: int | None = None,
    beside_bytes: int = 0,
    window: int = WINDOW,
    body: NativeBody | None = None,
) -> tuple[Decoder, Storage]:
    """Load the decoder of a store, frozen.

    Args:
        folder: the store.
        budget_bytes: for weights, buffers and the key/value cache together; None keeps everything in memory.
        reader: "auto", "direct", "buffered" or "mmap".
        num_tokens: longest text, prompt and answer together; None is the model's context, 2048 at most.
        beside_bytes: of the budget that are for a draft model and adapters.
        window: tokens whose neurons stay in memory, in a store of neurons.
        body: native kernels for a store whose matrices lie in tiles and for what lies beside neurons; whatever else is
            streamed runs on PyTorch.

    Raises:
        UnsupportedError: the matrices lie in tiles and there are no native kernels to read them.
        CheckpointError: the store is missing, broken or foreign.
        MemoryLimitError: the budget is too small.
        UsageError: there is no such reader, or it does not work here.
    """
    store = open_store(folder)
    tokens = min(store.config.max_positions, MAX_TOKENS) if num_tokens is None else num_tokens
    plan = plan_memory(store, budget_bytes, tokens, beside_bytes)
    if store.is_tiled and body is None:
        raise UnsupportedError(
            f"{store.folder} was written for native kernels and these are PyTorch's; convert the model with "
            "--kernels torch, or give --kernels auto"
        )
    has_neurons = plan.neurons_per_layer > 0
    used = body if store.is_tiled or (has_neurons and store.dtype == torch.bfloat16) else None
    found = open_reader(store.path, reader)
    choice = replace(found, reader=checked(found.reader, store))
    opened = open_async_reader(choice.reader, num_threads=SCATTERED_THREADS if has_neurons else NUM_THREADS)
    speed = choice.gb_per_s
    expected = plan.expected(store, speed, memory_gb_per_s()) if speed is not None and plan.streamed else None
    storage = Storage(store, plan, choice, opened, speed, expected_tokens_per_s=expected, body=used)
    storage, parts = _open_streamed(storage, window)
    joins_layers = storage.stream is None and storage.neurons is None
    screens = None if plan.budget_bytes is None or _fits_screen(store, plan) else False
    backend = None if used is None else CpuBackend(used, joins_layers=joins_layers, screens_head=screens)
    with torch.device("meta"):
        decoder = Decoder(store.config, parts, backend)
    _put_resident(decoder, storage)
    if backend is not None:
        _pack(decoder, backend)
    return decoder.requires_grad_(False).eval(), storage


def _fits_screen(store: Store, plan: MemoryPlan) -> bool:
    """Return whether the budget has room for the second copy of the head that would screen it."""
    assert plan.budget_bytes is not None
    size = size_of(store.config.vocab_size, store.config.width, "int8") + 8 * store.config.vocab_size
    return plan.num_bytes + size <= plan.budget_bytes


def _open_streamed(storage: Storage, window: int) -> tuple[Storage, DenseParts]:
    """Open what brings the weights that are not resident, and the modules over it."""
    store, plan, reader, config = storage.store, storage.plan, storage.async_reader, storage.store.config
    if plan.num_experts:
        assert config.moe is not None
        stored = StoredExperts(store, storage.reader.reader, storage.body)
        policy = NextUse(config.num_layers, config.moe.num_experts)
        experts = ExpertCache(stored, policy, config.num_layers, plan.num_experts)
        return replace(storage, experts=experts), CachedParts(config, experts)
    if plan.neurons_per_layer:
        neurons = NeuronLoader.of(store, reader, plan, window)
        neurons.body = storage.body
        return replace(storage, neurons=neurons), NeuronParts(config, neurons)
    if plan.streamed or store.weights != "bf16":  # quantized matrices stay as they lie, also where all are in memory
        stream = Stream(store, reader, plan.streamed)
        return replace(storage, stream=stream), StreamedParts(config, stream, storage.body)
    return storage, DenseParts(config)


def _put_resident(decoder: Decoder, storage: Storage) -> None:
    """Read the resident bundles into the parameters of a decoder."""
    has_tiles = storage.stream is not None and storage.body is not None
    for name in ("resident", *storage.plan.resident):
        for parameter, values in read_bundle(storage.store, storage.async_reader, name).items():
            if parameter == "selector":
                assert storage.neurons is not None
                assert isinstance(values, nn.Parameter)
                storage.neurons.select_by(name, values)
            elif has_tiles:
                put_tiles(decoder, parameter, values)
            else:
                put(decoder, parameter, in_rows(values))
    left = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    if left:
        raise CorruptError(f"the index of {storage.store.folder} lacks {summary(left)}; convert the model again")


def _pack(decoder: Decoder, backend: CpuBackend) -> None:
    """Hand what is in memory to the backend, layer by layer, so that no more than one layer is there twice."""
    backend.pack_ends(decoder)
    for index in range(decoder.config.num_layers):
        backend.pack_layer(decoder, index)
        _give_back()
    backend.finish(decoder)


def _give_back() -> None:
    """Return freed memory to the system where the C library offers it: glibc keeps tens of MiB for each matrix."""
    trim = trimmer()
    if trim is not None:
        trim(0)


def read_bundle(store: Store, reader: AsyncReader, name: str) -> dict[str, nn.Parameter | LowBit]:
    """Read the tensors of a bundle into memory of their own, and compare its checksum, or those of its pages.

    Raises:
        CheckpointError: it cannot be read.
        CorruptError: it is damaged.
    """
    bundle = store[name]
    memory = aligned(bundle.num_pages_bytes)
    reader.submit_whole(memory, bundle.offset).wait()
    checksum = bundle.checksum if page_sums_of(reader.reader) else zlib.crc32(memory[: bundle.num_bytes])
    if checksum != bundle.checksum:
        raise CorruptError(
            f"{store.path}: bundle {name} has checksum {checksum:08x}, its index says {bundle.checksum:08x}; "
            "convert the model again"
        )
    content = torch.frombuffer(memory, dtype=torch.uint8)
    return {
        part: values if isinstance(values, LowBit) else nn.Parameter(values, requires_grad=False)
        for part, values in store.tensors(name, content).items()
    }

"""Where experts lie: the seam, and the experts of a store as it is converted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig, MoeConfig
from vivace.core.cpu.low_bit import LowBitLinear
from vivace.core.cpu.packed import PackedFeedForward, PackedLinear
from vivace.core.layers import FeedForward, Linear
from vivace.core.moe import Expert
from vivace.errors import UnsupportedError
from vivace.kernels.layouts import Laid, num_tiles, some_tiles
from vivace.kernels.native import NativeBody
from vivace.storage.experts.policy import Key
from vivace.storage.io.async_reader import AsyncReader
from vivace.storage.io.checksums import checked
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.readers import Reader
from vivace.storage.store import Store, view


class ExpertStore(Protocol):
    """Where experts lie, each as one run of bytes of the same length."""

    expert_bytes: int

    def offset(self, key: Key) -> int:
        """Return where the bytes of an expert begin."""
        ...

    def open_reader(self, *, num_threads: int, chunk_bytes: int) -> AsyncReader:
        """Open an asynchronous reader of these bytes."""
        ...

    def expert(self, memory: Tensor) -> Expert:
        """Return a feed-forward over ``memory`` (expert_bytes,) uint8; it computes with the bytes that lie there."""
        ...


class StoredExperts:
    """Implements ``ExpertStore``: experts are bundles of whole pages, so direct reads go straight into slots."""

    def __init__(self, store: Store, reader: Reader, body: NativeBody | None = None) -> None:
        """Look up where the experts lie.

        Args:
            store: the model.
            reader: reads its file.
            body: runs experts that lie in tiles; None runs those that lie in rows, on PyTorch.

        Raises:
            UnsupportedError: the model has no experts.
            CorruptError: the store's table of checksums is damaged.
        """
        assert store.is_tiled == (body is not None), store.folder
        moe = store.config.moe
        if moe is None:
            raise UnsupportedError(f"{store.folder} holds a dense model: it has no experts to load ahead of time")
        self.store = store
        self.reader = checked(reader, store)
        self.body = body
        self.moe: MoeConfig = moe
        layers = [index for index in range(store.config.num_layers) if store.config.is_moe(index)]
        self._bundles = {(i, x): store[f"layers.{i}.experts.{x}"] for i in layers for x in range(moe.num_experts)}
        self._sample = next(iter(self._bundles.values()))
        self.expert_bytes = self._sample.num_pages_bytes

    @property
    def num_experts(self) -> int:
        """The number of experts of all layers."""
        return len(self._bundles)

    @property
    def keys(self) -> Iterable[Key]:
        """Return the keys of all experts of the store."""
        return self._bundles

    def offset(self, key: Key) -> int:
        """Return where an expert's pages begin in the file."""
        return self._bundles[key].offset

    def open_reader(self, *, num_threads: int, chunk_bytes: int) -> AsyncReader:
        """Open an asynchronous reader of the file."""
        return open_async_reader(self.reader, num_threads=num_threads, chunk_bytes=chunk_bytes)

    def expert(self, memory: Tensor) -> Expert:
        """Return the feed-forward over the bytes of a slot."""
        up, down = (view(memory, part, self.store.dtype) for part in self._sample.parts)
        if self.body is None:
            assert isinstance(up, Tensor)
            assert isinstance(down, Tensor)
            return feed_forward_over(self.store.config, up, down)
        return packed_over(self.store.config, self.body, up, down)


def packed_over(config: ModelConfig, body: NativeBody, up: Laid, down: Laid) -> Expert:
    """Build the same as ``feed_forward_over`` from matrices as they lie in a store for native kernels."""

    def linear(matrix: Laid) -> PackedLinear | LowBitLinear:
        return PackedLinear(body, matrix) if isinstance(matrix, Tensor) else LowBitLinear(matrix, None, body)

    if not config.gated:
        return PackedFeedForward(body, config.activation, 0, None, linear(up), linear(down))
    count = num_tiles(up) // 2
    gate, wide = (linear(some_tiles(up, half)) for half in (slice(count), slice(count, None)))
    return PackedFeedForward(body, config.activation, 0, gate, wide, linear(down))


def feed_forward_over(config: ModelConfig, up: Tensor, down: Tensor) -> FeedForward:
    """Build a feed-forward whose weights are these tensors, whatever is written into them later."""
    with torch.device("meta"):
        modules = [Linear(weight.shape[1], weight.shape[0]) for weight in (up, down)]
    for module, weight in zip(modules, (up, down), strict=True):
        module.weight = nn.Parameter(weight, requires_grad=False)
    return FeedForward(config, 0, *modules)

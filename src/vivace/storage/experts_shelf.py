"""Experts of a store (``store.py``) as a shelf: bundles of whole pages, so that direct reads go straight into slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig, MoeConfig
from vivace.core.cpu.packed import PackedFeedForward, PackedLinear
from vivace.core.layers import FeedForward, Linear
from vivace.core.seams import Expert
from vivace.errors import UnsupportedError
from vivace.kernels.library import found_library
from vivace.kernels.native import NativeBody
from vivace.storage.channel import Channel, NativeChannel, ThreadChannel
from vivace.storage.checksums import checked, page_sums_of
from vivace.storage.readers import Reader
from vivace.storage.store import Store, view
from vivace.storage.traces import Key


class StoreShelf:
    """Fills ``Shelf``."""

    def __init__(self, store: Store, reader: Reader, body: NativeBody | None = None) -> None:
        """Find the experts.

        Args:
            store: where they lie.
            reader: of its file.
            body: runs them, from tiles; None is PyTorch, from rows.

        Raises:
            UnsupportedError: the model has none.
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
        self.bundle_bytes = self._sample.num_pages_bytes

    @property
    def num_experts(self) -> int:
        """Of all layers."""
        return len(self._bundles)

    @property
    def keys(self) -> Iterable[Key]:
        """All experts."""
        return self._bundles

    def place(self, key: Key) -> int:
        """Where an expert's pages begin."""
        return self._bundles[key].offset

    def channel(self, slots: Sequence[memoryview], *, num_threads: int, chunk_bytes: int) -> Channel:
        """Native where the reader is of a file and the kernels are built; else threads of Python."""
        library, file = found_library(), self.reader.file
        if library is None or file is None:
            return ThreadChannel(self.reader.read, slots, num_threads=num_threads, chunk_bytes=chunk_bytes)
        return NativeChannel(
            library,
            file,
            self.store.path,
            slots,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
            pages=page_sums_of(self.reader),
        )

    def expert(self, layer_bytes: Tensor) -> Expert:
        """The feed-forward over a slot's bytes."""
        up, down = (view(layer_bytes, part, self.store.dtype) for part in self._sample.parts)
        if self.body is None:
            return feed_forward_over(self.store.config, up, down)
        return packed_over(self.store.config, self.body, up, down)


def packed_over(config: ModelConfig, body: NativeBody, up: Tensor, down: Tensor) -> Expert:
    """As ``feed_forward_over``, for tiles and the kernels that read them."""
    if not config.gated:
        return FeedForward(config, 0, PackedLinear(body, up), PackedLinear(body, down))
    gate, wide = (PackedLinear(body, half) for half in up.chunk(2))
    return PackedFeedForward(body, config.activation, 0, gate, wide, PackedLinear(body, down))


def feed_forward_over(config: ModelConfig, up: Tensor, down: Tensor) -> FeedForward:
    """The feed-forward whose weights are these tensors, whatever is written into them later."""
    with torch.device("meta"):
        modules = [Linear(weight.shape[1], weight.shape[0]) for weight in (up, down)]
    for module, weight in zip(modules, (up, down), strict=True):
        module.weight = nn.Parameter(weight, requires_grad=False)
    return FeedForward(config, 0, *modules)

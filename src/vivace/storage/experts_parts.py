"""A decoder whose experts come from a cache: the same modules over slots of memory instead of weights of their own."""

from __future__ import annotations

import torch
from torch import nn

from vivace.checkpoint.load import put
from vivace.core.config import ModelConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.core.moe import MixtureOfExperts
from vivace.core.parts import DenseParts
from vivace.kernels.native import NativeBody
from vivace.storage.checksums import checked
from vivace.storage.experts import ExpertCache
from vivace.storage.readers import Reader, aligned
from vivace.storage.store import Store, in_rows


class CachedParts(DenseParts):
    """All weights resident but the experts."""

    def __init__(self, config: ModelConfig, cache: ExpertCache) -> None:
        super().__init__(config)
        self.cache = cache

    def feed_forward(self, layer: int) -> nn.Module:
        """A feed-forward, or a router over experts that the cache brings."""
        c = self.config
        if not c.is_moe(layer):
            return super().feed_forward(layer)
        assert c.moe is not None
        return MixtureOfExperts(c.moe, Linear(c.width, c.moe.num_experts), self.cache.layer(layer))


def load_around(store: Store, reader: Reader, cache: ExpertCache, body: NativeBody | None = None) -> Decoder:
    """The decoder of a store over an expert cache: everything but experts is read into memory now.

    Args:
        store: the model.
        reader: of its file.
        cache: over a shelf of the same store.
        body: runs what is resident; that of the shelf.

    Raises:
        CheckpointError: a bundle could not be read.
    """
    reader = checked(reader, store)
    with torch.device("meta"):
        decoder = Decoder(store.config, CachedParts(store.config, cache))
    wanted = {name for name, _ in decoder.named_parameters()}
    for name, bundle in store.bundles.items():
        if not any(part.name in wanted for part in bundle.parts):
            continue
        memory = aligned(bundle.num_pages_bytes)
        reader.read(bundle.offset, memory)
        for part, values in store.tensors(name, torch.frombuffer(memory, dtype=torch.uint8)).items():
            put(decoder, part, in_rows(values))
            wanted.discard(part)
    assert not wanted, wanted
    pack_decoder(decoder.requires_grad_(False).eval(), body)
    return decoder

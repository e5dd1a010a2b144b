"""A baseline that predicts the experts of the next layers with their own routers, and a decoder to measure it on.

Before layer n runs, the router of layer n + ``lookahead`` is applied to the current residual (Eliseev and Mazur
2023, arXiv:2312.17238). It needs no training, and leaves little time for loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.checkpoint.load import put
from vivace.core.cache import KVCache
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts, likeliest
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.kernels.native import NativeBody
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.experts.parts import CachedParts
from vivace.storage.io.checksums import checked
from vivace.storage.io.readers import Reader, aligned
from vivace.storage.store import Store, in_rows


class NextLayerForwardPass:
    """A ``Traversal`` that runs all rows through all layers and prefetches what later routers choose on earlier
    residuals.
    """

    def __init__(self, count: int, lookahead: int = 1) -> None:
        """Set what is predicted.

        Args:
            count: number of experts predicted for each row.
            lookahead: number of layers between the residual and the router that is applied to it.
        """
        self.count = count
        self.lookahead = lookahead

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run one pass for all slots; for prompt chunks, which use nearly all experts, nothing is predicted."""
        step = Step.of(draft, cache, chunk=chunk)
        first = draft.entry_layer
        h = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        if step.is_prompt:
            h = model.run(h, step, first)
        else:
            for layer in range(first, first + self.lookahead + 1):
                self._predict(model, layer, h)

            def watch(layer: int, rows: Tensor) -> None:
                self._predict(model, layer + 1 + self.lookahead, rows)

            h = model.run(h, step, first, watch=watch)
        return TargetPass(hidden=h, rows=torch.arange(len(draft.tokens)))

    def _predict(self, model: Decoder, index: int, h: Tensor) -> None:
        """Prefetch the experts that the router of a layer chooses for the rows ``h`` (T, E)."""
        if index >= len(model.layers) or not model.config.is_moe(index):
            return
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        assert isinstance(layer.feed_forward, MixtureOfExperts)
        layer.feed_forward.experts.prefetch(likeliest(layer.route(h)[None], self.count)[0])


def load_around(store: Store, reader: Reader, cache: ExpertCache, body: NativeBody | None = None) -> Decoder:
    """Build the decoder of a store over an expert cache; everything but experts is read into memory now.

    Args:
        store: the model.
        reader: of its file.
        cache: of the experts of the same store.
        body: runs what is resident; the one that runs the experts.

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

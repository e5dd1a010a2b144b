"""A checkpoint of which one layer at a time is in memory, for work that goes through a model layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vivace.checkpoint.load import open_checkpoint, put
from vivace.core.model import Decoder
from vivace.core.step import Step


class LayerwiseDecoder:
    """A decoder whose rows are embedded first, and then go through all layers before the next one is read.

    Parameters are views of the file where they are stored in the form that is used; what was read for a layer is let
    go before the next one is. A layer must not be used after that, nor kept.
    """

    def __init__(self, path: str | Path, dtype: str | torch.dtype = "auto", *, ignored: Sequence[str] = ()) -> None:
        """Open a checkpoint and read nothing of its weights; arguments and errors are those of ``load_decoder``."""
        self._opened = open_checkpoint(path, dtype, "cpu", ignored=ignored)
        self.config = self._opened.config
        with torch.device("meta"):
            self._decoder = Decoder(self.config).requires_grad_(False).eval()
        self._names = [name for name, _ in self._decoder.named_parameters()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights."""
        return self._opened.dtype

    @property
    def layers(self) -> Iterator[nn.Module]:
        """The layers in order, each in memory until the next one is asked for."""
        self._let_go()
        for index, layer in enumerate(self._decoder.layers):
            self._read(f"layers.{index}.")
            yield layer
            self._let_go()

    def embed(self, tokens: Tensor, step: Step) -> Tensor:
        """Return the embeddings of tokens, (T,) -> (T, E), as ``Decoder.embed`` does."""
        if self._decoder.embedding.is_meta:
            self._read("layers.", is_within=False)
        return self._decoder.embed(tokens, step)

    def _read(self, prefix: str, *, is_within: bool = True) -> None:
        for name in self._names:
            if name.startswith(prefix) == is_within:
                put(self._decoder, name, self._opened.read(name))

    def _let_go(self) -> None:
        for name, parameter in self._decoder.named_parameters():
            if not parameter.is_meta:
                put(self._decoder, name, torch.empty_like(parameter, device="meta"))
        self._opened.stored.release()

"""The weights of a GGUF file under the names, and in the order of rows, of a Hugging Face checkpoint."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vivace.checkpoint.gguf.blocks import Bytes
from vivace.checkpoint.gguf.configuration import ROPE_TENSORS, find_architecture
from vivace.checkpoint.gguf.decoding import TYPES, decode, grid_of
from vivace.checkpoint.gguf.header import Header, read_header
from vivace.checkpoint.gguf.names import gguf_names
from vivace.checkpoint.names import Target
from vivace.kernels.grid import Grid


class GgufTensors:
    """The tensors of a file by the names of a checkpoint; blocks of codes are decoded when a tensor is read."""

    def __init__(self, path: Path, plan: Mapping[str, Target], heads: tuple[int, int]) -> None:
        """Map a file.

        Args:
            path: the file.
            plan: the parameters of the model, with the names of a checkpoint's tensors.
            heads: number of query heads and of key heads.

        Raises:
            CorruptError: the file is truncated.
        """
        self.header = read_header(path)
        self._architecture = find_architecture(self.header)
        self._raw = mapped(path)
        theirs = {
            piece.name: name
            for ours, target in plan.items()
            for name, piece in zip(gguf_names(ours, len(target.pieces)), target.pieces, strict=True)
        }
        stored = self.header.tensors
        self._theirs = {name: theirs[name] for name in theirs if theirs[name] in stored}
        others = set(stored) - set(self._theirs.values()) - set(ROPE_TENSORS)
        self._theirs |= {name: name for name in others}  # unexpected ones, for messages
        self._heads = {"attn_q": heads[0], "attn_k": heads[1]} if self._architecture.interleaves else {}

    def release(self) -> None:
        """Map the file anew, so that pages no view refers to any more leave memory."""
        self._raw = mapped(self.header.path)

    @property
    def names(self) -> Sequence[str]:
        """Names of the stored tensors."""
        return tuple(self._theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor without reading it."""
        return self.header.tensors[self._theirs[name]].shape

    def kind(self, name: str) -> str:
        """Return the number format of a stored tensor."""
        found = TYPES[self._type(name)].dtype
        return self._type(name) if found is None else str(found).removeprefix("torch.")

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a stored tensor in the file."""
        return self.header.tensors[self._theirs[name]].num_bytes

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a stored tensor; what is decoded has the given dtype, or float32.

        Raises:
            CorruptError: a scale in the file is not a finite number.
        """
        theirs = self._theirs[name]
        is_norm = len(self.shape(name)) == 1 and theirs.endswith("norm.weight")
        values = values_of(self.header, self._raw, theirs, None if is_norm else dtype)
        if is_norm and self._architecture.norm_offset:
            return values - self._architecture.norm_offset
        heads = self._heads.get(theirs.split(".")[-2])
        return values if heads is None else _halves(values, heads)

    def grid(self, name: str) -> Grid | None:
        """Return a stored matrix as its codes; None where it is not stored as codes.

        Raises:
            CorruptError: a scale in the file is not a finite number.
        """
        theirs = self._theirs[name]
        entry = self.header.tensors[theirs]
        if len(entry.shape) != 2:
            return None
        part = self._raw[entry.start : entry.start + entry.num_bytes]
        found = grid_of(part, entry.shape, entry.type, f"{self.header.path}: {theirs}")
        heads = self._heads.get(theirs.split(".")[-2])
        return found if found is None or heads is None else found.reordered(heads)

    def _type(self, name: str) -> str:
        return self.header.tensors[self._theirs[name]].type


def mapped(path: Path) -> Bytes:
    """Map the bytes of a file into memory, to be changed by nobody."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


def values_of(header: Header, raw: Bytes, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a tensor of a mapped file, by its name there."""
    entry = header.tensors[name]
    part = raw[entry.start : entry.start + entry.num_bytes]
    return decode(part, entry.shape, entry.type, f"{header.path}: {name}", dtype)


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of each head: component i stands beside i + D / 2 there."""
    by_pair = values.view(heads, -1, 2, *values.shape[1:])
    return by_pair.transpose(1, 2).reshape(values.shape)

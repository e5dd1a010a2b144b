"""What the formats share: the stored tensors of one matrix, packed integers, and the checks of what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vivace.errors import CorruptError, UnsupportedError
from vivace.kernels.grid import Grid

WORD = 32
"""Bits of the integers that codes are packed into."""


@dataclass(frozen=True)
class StoredParts:
    """The stored tensors of one quantized matrix."""

    stem: str
    """Name of the module, such as ``model.layers.0.mlp.up_proj``."""
    names: frozenset[str]
    """Names of its tensors without the stem, such as ``.qweight``."""
    get: Callable[[str], Tensor]
    """Reads a tensor by its whole name."""
    shape_of: Callable[[str], tuple[int, ...]]
    """Returns the shape of a tensor by its whole name, without reading it."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its name without the stem.

        Raises:
            CorruptError: there is none.
        """
        if name not in self.names:
            raise CorruptError(f"{self.stem} has no {name[1:]}, without which its weights cannot be read")
        return self.get(self.stem + name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raises as ``tensor``."""
        if name not in self.names:
            raise CorruptError(f"{self.stem} has no {name[1:]}, without which its weights cannot be read")
        return self.shape_of(self.stem + name)

    def sides(self, name: str) -> tuple[int, int]:
        """Return the shape of a tensor with two dimensions.

        Raises:
            CorruptError: there is none, or it has others.
        """
        shape = self.shape(name)
        agree(len(shape) == 2, self, f"{name[1:]} is no matrix")
        return shape[0], shape[1]


class Format(Protocol):
    """How one checkpoint's quantized matrices are read."""

    mark: str
    """A tensor of this name (without its stem) says that a module is quantized."""
    names: frozenset[str]
    """All names (without stem) of tensors that describe a quantized matrix."""

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix without reading its codes."""

    def kind(self, stored: StoredParts) -> str:
        """Return the name of the number format of a matrix, such as ``gptq-4``."""

    def read(self, stored: StoredParts) -> Grid | Tensor:
        """Return a matrix: a grid, or float32 numbers where the format is none.

        Raises:
            CorruptError: the tensors do not fit each other, or a number in them cannot be.
        """


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return unsigned codes that lie in integers as one string of bits, lowest first.

    Args:
        words: (rows, n) int32 or uint32.
        bits: number of bits of a code, at most 8.
        count: number of codes of a row.

    Returns:
        (rows, count) uint8.

    Raises:
        CorruptError: there are not as many codes.
    """
    if words.shape[1] * WORD < count * bits:
        raise CorruptError(f"{words.shape[1]} words hold fewer than {count} codes of {bits} bits")
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[:, :count]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (raw[:, :, None] >> shifts & ((1 << bits) - 1)).flatten(1)[:, :count].contiguous()
    places = torch.arange(count) * bits
    first, shift = places // 8, (places % 8).int()
    low = raw[:, first].int()
    high = raw[:, (first + 1).clamp(max=raw.shape[1] - 1)].int()
    return ((low | high << 8) >> shift & ((1 << bits) - 1)).to(torch.uint8)


def finite(values: Tensor, what: str) -> Tensor:
    """Return scales or offsets in float32.

    Raises:
        CorruptError: one is infinite or not a number.
    """
    wide = values.float()
    if not bool(torch.isfinite(wide).all()):
        raise CorruptError(f"{what}: a number is infinite or not a number; the file is damaged or overflowed float16")
    return wide


def agree(is_so: bool, stored: StoredParts, what: str) -> None:
    """Refuse tensors that do not fit each other.

    Raises:
        CorruptError: they do not.
    """
    if not is_so:
        shapes = ", ".join(f"{name[1:]} {list(stored.shape(name))}" for name in sorted(stored.names))
        raise CorruptError(f"{stored.stem}: {what}; its tensors are {shapes}")


def one_of(config: Mapping[str, Any], key: str, read: tuple[Any, ...], default: Any = None) -> Any:
    """Return a setting of a ``quantization_config``.

    Raises:
        UnsupportedError: its value is not among those that are read.
    """
    value = config.get(key, default)
    if value not in read:
        known = ", ".join(str(each) for each in read)
        raise UnsupportedError(f"quantization_config says {key} = {value!r}, which is not read; read are {known}")
    return value


def number_of(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of a ``quantization_config``.

    Raises:
        UnsupportedError: it is no whole number.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedError(f"quantization_config says {key} = {value!r}, which is no whole number")
    return value


def block_of(value: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a block, as a ``quantization_config`` says them.

    Raises:
        UnsupportedError: they are no two numbers above 0.
    """
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(each, int) and each > 0 for each in value):
        raise UnsupportedError(f"quantization_config says {value!r} for the shape of a block; it has two numbers")
    return value[0], value[1]


def groups_of(stored: StoredParts, width: int, count: int, size: int) -> int:
    """Return the number of inputs of a group.

    Args:
        stored: the matrix.
        width: number of inputs.
        count: number of groups that are stored.
        size: number of inputs that the configuration says; -1 or 0 for all.

    Raises:
        CorruptError: they do not fit each other.
    """
    group = size if size > 0 else width
    agree(count == -(-width // group), stored, f"{count} groups of {group} do not cover {width} inputs")
    return group

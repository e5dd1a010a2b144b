"""GPTQ, as AutoGPTQ and GPTQModel write it (Frantar et al., 2022, arXiv:2210.17323).

A matrix (out, in) in ``b`` bits is

    qweight  int32 (in b / 32, out)           codes along the inputs, lowest bits first
    qzeros   int32 (groups, out b / 32)       codes that stand for zero, along the outputs
    scales   float16 or bfloat16 (groups, out)
    g_idx    int32 (in,)                      group of each input; not in order where inputs were ordered by activation

and a weight is ``scale (code - zero)``. In the first version of the format (``checkpoint_format``, which newer
writers call ``format``, is absent or ``gptq``) the stored zeros are one too low; in ``gptq_v2`` they are what they say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.quantized.parts import WORD, StoredParts, agree, finite, groups_of, number_of, one_of, unpacked
from vivace.errors import CorruptError, UnsupportedError
from vivace.kernels.grid import Grid

BITS = (2, 3, 4, 8)
"""Widths of codes that are read."""


class Gptq:
    """Reads the matrices of one checkpoint."""

    mark = ".qweight"
    names = frozenset({".qweight", ".qzeros", ".scales", ".g_idx"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the settings of a ``quantization_config``.

        Raises:
            UnsupportedError: a setting is not read.
        """
        one_of(config, "bits", BITS)
        names = [key for key in ("checkpoint_format", "format") if config.get(key) is not None]
        found = {one_of(config, key, ("gptq", "gptq_v2")) for key in names} or {"gptq"}
        if len(found) > 1:
            raise UnsupportedError(
                "quantization_config has two formats, checkpoint_format and format; take one of them out"
            )
        self.is_first = found == {"gptq"}
        one_of(config, "pack_dtype", ("int32", None))
        self.bits = int(config["bits"])
        self.group_size = number_of(config, "group_size", 128)

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        if ".g_idx" in stored.names:
            return stored.sides(".scales")[1], stored.shape(".g_idx")[0]
        return stored.sides(".scales")[1], stored.sides(".qweight")[0] * WORD // self.bits

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return f"gptq-{self._bits(stored)}"

    def _bits(self, stored: StoredParts) -> int:
        """Return the bits of a code, which may differ between matrices."""
        return stored.sides(".qweight")[0] * WORD // self.shape(stored)[1]

    def read(self, stored: StoredParts) -> Grid:
        """Return a matrix."""
        out, width = self.shape(stored)
        bits = self._bits(stored)
        count = stored.sides(".scales")[0]
        fits = (
            bits in BITS
            and stored.shape(".qweight") == (width * bits // WORD, out)
            and stored.shape(".qzeros") == (count, out * bits // WORD)
        )
        agree(fits, stored, f"they are no GPTQ matrix of {self.bits} bits")
        codes = unpacked(stored.tensor(".qweight").t(), bits, width)
        scales = finite(stored.tensor(".scales"), f"{stored.stem}.scales").t()
        zeros = self._zeros(stored.tensor(".qzeros"), bits, out).t().float().contiguous()
        scales = scales.contiguous()
        index = stored.tensor(".g_idx").long() if ".g_idx" in stored.names else None
        if index is None or bool((index.diff() >= 0).all()):
            return Grid(codes, scales, self._group(stored, index, width, count), zeros)
        order = torch.argsort(index, stable=True)
        group = self._group(stored, index[order], width, count)
        return Grid(codes[:, order].contiguous(), scales, group, zeros, order=order)

    def _group(self, stored: StoredParts, index: Tensor | None, width: int, count: int) -> int:
        """Return the size of a group, given the group of each input in order.

        Raises:
            CorruptError: groups are of different sizes, or an input belongs to a group that is not there.
        """
        size = self.group_size
        if index is None:
            return groups_of(stored, width, count, size)
        fits = size > 0 and count == -(-width // size)  # the last group may have fewer inputs
        if count and not (fits and torch.equal(index, torch.arange(width) // size)):
            size = -(-width // count)  # a matrix with a size of its own ("dynamic")
        if not torch.equal(index, torch.arange(width) // size):
            raise CorruptError(f"{stored.stem}.g_idx does not divide {width} inputs into {count} groups of one size")
        return groups_of(stored, width, count, size)

    def _zeros(self, words: Tensor, bits: int, out: int) -> Tensor:
        """Return the codes that stand for zero, (groups, out)."""
        if not self.is_first:
            return unpacked(words, bits, out)
        if WORD % bits == 0:
            # one is added to whole words, carries included, as writers took it off
            ones = sum(1 << place for place in range(0, WORD, bits))
            return unpacked((words.long() + ones).bitwise_and(0xFFFFFFFF).to(torch.uint32), bits, out)
        return unpacked(words, bits, out) + 1 & (1 << bits) - 1

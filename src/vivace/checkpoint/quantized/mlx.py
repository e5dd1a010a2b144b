"""MLX's affine quantization, as mlx-lm writes it (``quantization`` in ``config.json``).

A matrix (out, in) in ``b`` bits is

    weight  uint32 (out, in b / 32)     codes along the inputs, as one string of bits, lowest first
    scales  (out, in / group)           of the model's dtype
    biases  (out, in / group)

and a weight is ``scale code + bias``. The embedding and the head are quantized too. ``quantization`` may have settings
of single matrices, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vivace.checkpoint.quantized.parts import WORD, StoredParts, agree, finite, number_of, one_of, unpacked
from vivace.kernels.grid import Grid

BITS = (2, 3, 4, 5, 6, 8)
"""Widths of codes that are read."""


class Mlx:
    """Reads the matrices of one checkpoint."""

    mark = ".scales"
    names = frozenset({".weight", ".scales", ".biases"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the settings of ``quantization``.

        Raises:
            UnsupportedError: a setting is not read.
        """
        self.config = config
        for each in (config, *(value for value in config.values() if isinstance(value, Mapping))):
            one_of(each, "mode", ("affine",), "affine")
            if each is config or "bits" in each:
                one_of(each, "bits", BITS)

    def _group(self, stored: StoredParts) -> int:
        own = self.config.get(stored.stem)
        if isinstance(own, Mapping) and own.get("group_size"):
            return number_of(own, "group_size", 64)
        return number_of(self.config, "group_size", 64)

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        return stored.sides(".weight")[0], stored.sides(".scales")[1] * self._group(stored)

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return f"mlx-{stored.shape('.weight')[1] * WORD // self.shape(stored)[1]}"

    def read(self, stored: StoredParts) -> Grid:
        """Return a matrix."""
        out, width = self.shape(stored)
        bits, rest = divmod(stored.sides(".weight")[1] * WORD, width)
        agree(rest == 0 and bits in BITS and out == stored.sides(".scales")[0], stored, "they are no MLX matrix")
        agree(stored.shape(".biases") == stored.shape(".scales"), stored, "biases do not fit scales")
        scales = finite(stored.tensor(".scales"), f"{stored.stem}.scales")
        offsets = finite(stored.tensor(".biases"), f"{stored.stem}.biases")
        codes = unpacked(stored.tensor(".weight"), bits, width)
        return Grid(codes, scales, self._group(stored), offsets=offsets)

"""AWQ in its ``gemm`` layout, as AutoAWQ and GPTQModel write it (Lin et al., 2023, arXiv:2306.00978).

A matrix (out, in) in four bits is

    qweight  int32 (in, out / 8)       codes of eight outputs in a word
    qzeros   int32 (in / group, out / 8)   codes that stand for zero
    scales   float16 (in / group, out)

and a weight is ``scale (code - zero)``. From the lowest bits on, a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.quantized.parts import StoredParts, agree, finite, groups_of, number_of, one_of, unpacked
from vivace.kernels.grid import Grid

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight outputs."""


class Awq:
    """Reads the matrices of one checkpoint."""

    mark = ".qweight"
    names = frozenset({".qweight", ".qzeros", ".scales", ".g_idx"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the settings of a ``quantization_config``.

        Raises:
            UnsupportedError: a setting is not read.
        """
        one_of(config, "w_bit" if "w_bit" in config else "bits", (4,))
        version = str(config.get("version", config.get("checkpoint_format", config.get("format", "gemm")))).lower()
        one_of({"version": version}, "version", ("gemm",))
        self.group_size = number_of(config, "group_size" if "group_size" in config else "q_group_size", 128)

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        return stored.sides(".scales")[1], stored.sides(".qweight")[0]

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return "awq-4"

    def read(self, stored: StoredParts) -> Grid:
        """Return a matrix."""
        out, width = self.shape(stored)
        count = stored.sides(".scales")[0]
        fits = (
            out % 8 == 0
            and stored.shape(".qweight") == (width, out // 8)
            and stored.shape(".qzeros") == (count, out // 8)
        )
        agree(fits, stored, "they are no AWQ matrix")
        group = groups_of(stored, width, count, self.group_size)
        codes = _outputs(stored.tensor(".qweight"), out).t().contiguous()
        scales = finite(stored.tensor(".scales"), f"{stored.stem}.scales").t().contiguous()
        zeros = _outputs(stored.tensor(".qzeros"), out).t().float().contiguous()
        return Grid(codes, scales, group, zeros)


def _outputs(words: Tensor, out: int) -> Tensor:
    """Return codes in the order of outputs, (rows, out / 8) -> (rows, out)."""
    codes = unpacked(words, 4, out)
    return codes.view(len(words), -1, 8)[:, :, torch.tensor(PLACES)].reshape(len(words), out)

"""The tensors of a quantized checkpoint under the names and in the shapes that they had before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.files import TensorFiles
from vivace.checkpoint.quantized.awq import Awq
from vivace.checkpoint.quantized.bitsandbytes import EightBits, FourBits
from vivace.checkpoint.quantized.compressed import CompressedTensors
from vivace.checkpoint.quantized.fp8 import Fp8
from vivace.checkpoint.quantized.gptq import Gptq
from vivace.checkpoint.quantized.mlx import Mlx
from vivace.checkpoint.quantized.parts import Format, StoredParts
from vivace.errors import MismatchError
from vivace.kernels.grid import Grid

_WEIGHT = ".weight"


def _bitsandbytes(config: Mapping[str, Any], names: Collection[str]) -> Format:
    return EightBits(config) if any(name.endswith(EightBits.mark) for name in names) else FourBits(config)


def _fp8(config: Mapping[str, Any], names: Collection[str]) -> Format:
    is_inverse = any(name.endswith(".weight_scale_inv") for name in names)
    return Fp8(config, ".weight_scale_inv" if is_inverse else ".weight_scale")


FORMATS: Mapping[str, Callable[[Mapping[str, Any], Collection[str]], Format]] = {
    "gptq": lambda config, names: Gptq(config),
    "awq": lambda config, names: Awq(config),
    "compressed-tensors": lambda config, names: CompressedTensors(config),
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mlx": lambda config, names: Mlx(config),
}
"""Makes the format of a checkpoint from its settings and the names of its tensors, by the name in ``settings.READ``."""


class QuantizedTensors:
    """The tensors of a checkpoint, those of quantized modules as one ``weight`` that is decoded when it is read."""

    def __init__(self, files: TensorFiles, method: str, config: Mapping[str, Any]) -> None:
        """Find the quantized matrices.

        Args:
            files: the stored tensors.
            method: a name of ``FORMATS``.
            config: its settings.

        Raises:
            UnsupportedError: a setting is not read.
            MismatchError: nothing in the files is quantized in this way.
        """
        self._files = files
        names = frozenset(files.names)
        self.format = FORMATS[method](config, names)
        mark = self.format.mark
        stems = [name.removesuffix(mark) for name in files.names if name.endswith(mark)]
        if not stems:
            raise MismatchError(f"config.json says that weights are {method}, and the files have no tensor *{mark}")
        self._quantized = {
            stem + _WEIGHT: StoredParts(
                stem,
                frozenset(part for part in self.format.names if stem + part in names),
                self._tensor,
                files.shape,
            )
            for stem in stems
        }
        used = {each.stem + part for each in self._quantized.values() for part in each.names}
        self._plain = [name for name in files.names if name not in used]

    def _tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def release(self) -> None:
        """Map the files anew, so that pages no view refers to any more leave memory."""
        self._files.release()

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors as they were before."""
        return (*self._plain, *self._quantized)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it was before."""
        found = self._quantized.get(name)
        return self._files.shape(name) if found is None else self.format.shape(found)

    def kind(self, name: str) -> str:
        """Return the dtype or number format of a tensor."""
        found = self._quantized.get(name)
        return self._files.kind(name) if found is None else self.format.kind(found)

    def num_bytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in its file, scales and zeros included."""
        found = self._quantized.get(name)
        parts = (name,) if found is None else tuple(found.stem + part for part in found.names)
        return sum(self._files.num_bytes(part) for part in parts)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor: a view of the file, or decoded in ``dtype`` (float32).

        Raises:
            CorruptError: its parts do not fit each other, or a number in them cannot be.
        """
        found = self._quantized.get(name)
        if found is None:
            return self._files.tensor(name)
        values = self.format.read(found)
        kind = dtype or torch.float32
        return values.dense(kind) if isinstance(values, Grid) else values.to(kind)

    def grid(self, name: str) -> Grid | None:
        """Return a matrix as its codes; None if it is not stored as codes of a grid."""
        found = self._quantized.get(name)
        values = None if found is None else self.format.read(found)
        return values if isinstance(values, Grid) else None

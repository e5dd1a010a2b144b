"""Checkpoint folders whose matrices are palettes: what ``vivace compress`` writes.

``config.json`` has ``"quantization_config": {"quant_method": "palette", "version": 1, "rows": 16, "inputs": 64}``. A
matrix (out, in) of the module ``STEM`` is stored as

    STEM.idx      uint8 (out, in bits / 8)    codes of two, three or four bits, lowest bits first; in is a multiple of 8
    STEM.lut      (out / 16, 2^bits)          the entries of each sixteen outputs, rising: bfloat16, or int8 with scales
    STEM.scale    bfloat16 (out, in / 64)     factors on int8 entries, for each output and 64 inputs

or in eight bits as

    STEM.idx      int8 (out, in)              none of them -128
    STEM.scale    float32 (out,)

with quotients rounded up. All other tensors are stored under their own names. The weight of a code c is
``lut[output / 16, c]``, times its scale if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.files import TensorFiles
from vivace.checkpoint.quantized.parts import one_of
from vivace.checkpoint.quantized.settings import PALETTE
from vivace.errors import CorruptError
from vivace.kernels.coded import Coded, PaletteCodes, RowCodes, packed_bits, unpacked_bits
from vivace.kernels.library import GROUP, LANES
from vivace.kernels.palette import BITS

CONFIG: Mapping[str, Any] = {"quant_method": PALETTE, "version": 1, "rows": LANES, "inputs": GROUP}
"""The ``quantization_config`` of these folders."""
WIDTHS = 8
"""Numbers of inputs are multiples of this, so that the codes of an output fill whole bytes."""

_WEIGHT = ".weight"


def tensors_of(name: str, coded: Coded) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix, given the name that its weight has."""
    stem = name.removesuffix(_WEIGHT)
    if isinstance(coded, RowCodes):
        return {f"{stem}.idx": coded.codes, f"{stem}.scale": coded.scales}
    assert isinstance(coded, PaletteCodes)
    found = {f"{stem}.idx": packed_bits(coded.codes, coded.bits), f"{stem}.lut": coded.entries}
    return found if coded.scales is None else found | {f"{stem}.scale": coded.scales}


class PaletteTensors:
    """The tensors of a folder of palettes under the names that they had before (``Tensors``)."""

    def __init__(self, files: TensorFiles, config: Mapping[str, Any]) -> None:
        """Find the matrices that are stored in few bits.

        Raises:
            UnsupportedError: a setting of the ``quantization_config`` is not read.
            CorruptError: parts of a matrix are missing.
        """
        for key, value in CONFIG.items():
            one_of(config, key, (value,))
        self._files = files
        names = frozenset(files.names)
        self._parts: dict[str, tuple[str, ...]] = {}
        for name in files.names:
            if not name.endswith(".idx"):
                continue
            stem = name.removesuffix(".idx")
            parts = tuple(stem + ending for ending in (".idx", ".lut", ".scale") if stem + ending in names)
            if len(parts) == 1:
                raise CorruptError(f"{stem} has codes, and neither {stem}.lut nor {stem}.scale that they stand for")
            self._parts[stem + _WEIGHT] = parts
        used = {part for parts in self._parts.values() for part in parts}
        self._plain = tuple(name for name in files.names if name not in used)

    def release(self) -> None:
        """Map the files anew, so that pages no view refers to any more leave memory."""
        self._files.release()

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors as they were before."""
        return (*self._plain, *self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it was before.

        Raises:
            CorruptError: the parts of a matrix do not fit each other.
        """
        if name not in self._parts:
            return self._files.shape(name)
        stem = name.removesuffix(_WEIGHT)
        codes = self._files.shape(f"{stem}.idx")
        if len(codes) != 2:
            raise CorruptError(f"{stem}.idx has {len(codes)} dimensions, and codes have two")
        out, count = codes
        bits = self._bits(name)
        width, rest = divmod(count * 8, bits)
        tiles, groups = -(-out // LANES), -(-width // GROUP)
        wanted = {f"{stem}.lut": (tiles, 1 << bits), f"{stem}.scale": (out,) if bits == 8 else (out, groups)}
        found = {part: self._files.shape(part) for part in self._parts[name] if not part.endswith(".idx")}
        if rest or any(shape != wanted[part] for part, shape in found.items()):
            shapes = ", ".join(f"{part} {list(self._files.shape(part))}" for part in self._parts[name])
            raise CorruptError(f"the parts of {name} do not fit each other: {shapes}")
        return out, width

    def kind(self, name: str) -> str:
        """Return the dtype or number format of a tensor."""
        if name not in self._parts:
            return self._files.kind(name)
        bits = self._bits(name)
        return "int8_rows" if bits == 8 else f"lut{bits}" + ("_ints" if len(self._parts[name]) == 3 else "")

    def num_bytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in its file, entries and scales included."""
        return sum(self._files.num_bytes(part) for part in self._parts.get(name, (name,)))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor: a view of the file, or the weights of a matrix in ``dtype`` (float32)."""
        coded = self.coded(name)
        return self._files.tensor(name) if coded is None else coded.dense(dtype or torch.float32)

    def coded(self, name: str) -> Coded | None:
        """Return a matrix as its codes; None if it is not stored in few bits.

        Raises:
            CorruptError: its parts do not fit each other, or a number in them is not finite.
        """
        if name not in self._parts:
            return None
        width = self.shape(name)[1]
        parts = {part.rpartition(".")[2]: self._files.tensor(part) for part in self._parts[name]}
        self._check_types(name, parts)
        codes = parts.pop("idx")
        entries, scales = (parts[part].clone() if part in parts else None for part in ("lut", "scale"))  # off the map
        for part in (entries, scales):
            if part is not None and part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise CorruptError(f"{name}: an entry or a scale is infinite or not a number; the file is damaged")
        if entries is None:
            assert scales is not None
            return RowCodes(codes, scales.float())
        if scales is not None and entries.dtype == torch.int8 and bool((entries == -128).any()):
            raise CorruptError(f"{name}: an entry is -128, and entries are -127 to 127; the file is damaged")
        if (scales is None) != (entries.dtype != torch.int8):
            raise CorruptError(f"{name}: its entries are {entries.dtype}, and int8 entries have scales, others none")
        return PaletteCodes(unpacked_bits(codes, self._bits(name), width), entries, scales)

    def _check_types(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Refuse parts of a type that is never written: their numbers would be taken for others.

        Raises:
            CorruptError: a part has another type, or a number beyond its range.
        """
        is_rows = self._bits(name) == 8
        wanted = {"idx": torch.int8 if is_rows else torch.uint8, "scale": torch.float32 if is_rows else torch.bfloat16}
        for part, dtype in wanted.items():
            if part in parts and parts[part].dtype != dtype:
                raise CorruptError(
                    f"{name}: its {part} is {parts[part].dtype}, and {dtype} is written; the file is damaged"
                )
        if is_rows and bool((parts["idx"] == -128).any()):
            raise CorruptError(f"{name}: a code is -128, and codes are -127 to 127; the file is damaged")

    def _bits(self, name: str) -> int:
        stem = name.removesuffix(_WEIGHT)
        if f"{stem}.lut" not in self._parts[name]:
            return 8
        num = self._files.shape(f"{stem}.lut")[-1]
        bits = num.bit_length() - 1
        if bits not in BITS or num != 1 << bits:
            raise CorruptError(f"{stem}.lut has {num} entries for each sixteen outputs, and a palette has 4, 8 or 16")
        return bits

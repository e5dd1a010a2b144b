"""Memory in huge pages for numbers that every pass reads.

A decoding step reads all weights once. In pages of 4 KiB a processor looks up an address after every 64 lines of its
cache and stops reading ahead there; a huge page has 2 MiB. Linux gives them to memory that asks for them, unless
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``. Other systems are not asked, and nothing changes there.

On SmolLM2-135M and two cores of Zen 4 a step takes 5 to 10 % less time, on one core 6 % (bfloat16) to 13 % (three
bits).
"""

from __future__ import annotations

import dataclasses
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Parts = TypeVar("Parts", bound="DataclassInstance")

HUGE = 2 * 2**20
"""Bytes of a huge page."""
AREA = 16 * 2**20
"""Bytes that are asked for at a time, for many matrices."""
LINE = 64
"""Bytes of a line of the cache and of the widest vector, at which every tensor begins."""

_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class HugePages:
    """Memory into which tensors are copied one behind another; it lives as long as one of them.

    Of an area of memory, only what lies in whole huge pages asks for them, so that no more is allocated than tensors
    take.
    """

    def __init__(self, area_bytes: int = AREA) -> None:
        """Begin without any memory.

        Args:
            area_bytes: how much is asked for at a time; a larger tensor gets an area of its own size.
        """
        self.area_bytes = area_bytes
        self._area: mmap.mmap | None = None
        self._next = self._stop = 0

    def hold(self, values: Tensor) -> Tensor:
        """Return a copy of a tensor in this memory; the tensor itself where there are no huge pages, or in a GPU."""
        if _ADVICE is None or values.device.type != "cpu" or not values.numel():
            return values
        if self._next + values.nbytes > self._stop:
            self._reserve(max(self.area_bytes, values.nbytes))
        assert self._area is not None
        held = torch.frombuffer(self._area, dtype=values.dtype, count=values.numel(), offset=self._next)
        self._next += -(-values.nbytes // LINE) * LINE
        return held.view(values.shape).copy_(values)

    def hold_parts(self, parts: Parts) -> Parts:
        """Return the same structure with every tensor of it in this memory."""
        fields: dict[str, Any] = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
        held = {name: self.hold(value) for name, value in fields.items() if isinstance(value, Tensor)}
        return dataclasses.replace(parts, **held)

    def _reserve(self, num_bytes: int) -> None:
        area = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % HUGE
        assert _ADVICE is not None
        with suppress(OSError):  # a kernel without huge pages refuses the advice
            area.madvise(_ADVICE, first, num_bytes // HUGE * HUGE)
        self._area, self._next, self._stop = area, first, first + num_bytes

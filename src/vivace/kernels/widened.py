"""Products of bfloat16 matrices on processors that have none: computed in float32 and rounded once, at the end.

PyTorch multiplies bfloat16 with oneDNN where a processor has AVX-512, and elsewhere number by number: 6 times as slowly
as float32 forward and 30 times backward, on a processor with AVX2. Sums are in float32 either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.linear.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
"""What is computed in float32; every other product of PyTorch is made of these."""


@cache
def multiplies_bfloat16() -> bool:
    """Return whether PyTorch has fast products of bfloat16 on this processor."""
    found = torch.cpu.get_capabilities()
    return found.get("architecture") != "x86_64" or bool(found.get("avx512_bw")) or bool(found.get("avx_ne_convert"))


class _Widened(TorchDispatchMode):
    """Computes products of bfloat16 tensors on the CPU in float32, forward and backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or PyTorch imports its compiler for seconds at the first product, which nothing here uses."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if func not in PRODUCTS or first is None or first.dtype != torch.bfloat16 or first.device.type != "cpu":
            return func(*args, **kwargs)
        wide = tree_map_only(Tensor, _float, (tuple(args), dict(kwargs)))
        found = func(*wide[0], **wide[1])
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return found[0].bfloat16(), found[1]  # logarithms of sums are in float32 for every dtype
        return tree_map_only(Tensor, Tensor.bfloat16, found)


def _float(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value


@contextmanager
def widened_products() -> Iterator[None]:
    """Compute products of bfloat16 in float32 within this context, where the processor has no fast ones."""
    if multiplies_bfloat16():
        yield
        return
    with _Widened():  # type: ignore[no-untyped-call]
        yield

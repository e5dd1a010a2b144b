"""Graphs without a GPU: the operations of a pass are noted with their tensors, and done again on the same tensors.

What a CUDA graph cannot hold is refused here too: numbers that Python reads, shapes that depend on numbers, and tensors
that are made from Python's numbers while recording (they would be those of the recording for ever).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::equal", "aten::lift_fresh"}


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        assert name not in WAITS, f"a graph cannot hold {name}"
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result


def recorded(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record like ``cuda_graph``."""
    with _Notes() as notes:
        result = work()

    def launch() -> None:
        for func, args, kwargs, before in notes.done:
            again = func(*args, **kwargs)
            for old, new in zip(_listed(before), _listed(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view of what was done again nor written in place
                    old.copy_(new)

    return launch, result


def _listed(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]

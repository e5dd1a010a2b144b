"""A device that is none: tensors on it are kept by the CPU, and meet its own as little as a GPU's would.

A tensor made on or moved to ``FOREIGN`` is a ``ForeignTensor``: it holds a tensor of the CPU, says that it lies
elsewhere, and takes every operation to what it holds. Where one meets a tensor of the CPU that has dimensions, a GPU
would refuse; here the place is noted and the operation goes on, so that one run names all places. Copies between the
two (``.to``, ``.cpu``, ``.tolist``, ``.item``, ``copy_``) are as free as they are there.

PyTorch's "meta" device lends its name, since autograd takes it for a device that needs no thread of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import vivace

FOREIGN = torch.device("meta")
SOURCES = Path(vivace.__file__).parent
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

mixed: Counter[str] = Counter()
"""Places (file:line and operation) at which tensors of both devices met, and how often."""
copied: Counter[str] = Counter()
"""Places at which numbers came back from the device: a GPU's work stops there until they have."""


@contextmanager
def foreign_device() -> Iterator[torch.device]:
    """Within it, ``FOREIGN`` can be used like any device.

    Raises:
        AssertionError: tensors of two devices met.
    """
    mixed.clear()
    copied.clear()
    autocast = torch.autocast
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as on a GPU
    torch.autocast = lambda kind, *args, **how: autocast("cpu" if kind == FOREIGN.type else kind, *args, **how)  # type: ignore[assignment,misc]
    try:
        with _Makes(), _Reads():
            yield FOREIGN
    finally:
        torch.autocast = autocast  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not mixed, f"tensors of two devices met at {len(mixed)} places:\n" + "\n".join(sorted(mixed))


class ForeignTensor(Tensor):
    """A tensor of the CPU that says it lies elsewhere."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> ForeignTensor:
        made: ForeignTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=FOREIGN
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Foreign({self.held!r})"


class _Makes(TorchDispatchMode):
    """Takes what is made on the device, or moved there, to ``ForeignTensor``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Moves numbers of Python to the device, which PyTorch does not do for "meta"."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.new_tensor and isinstance(args[0], ForeignTensor):
            return args[0].held.new_tensor(*args[1:], **kwargs).to(FOREIGN)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], ForeignTensor):
            args = (args[0], _beside(args[1]), *args[2:])
        if func is Tensor.tolist and isinstance(args[0], ForeignTensor):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


def _beside(index: Any) -> Any:
    """An index whose lists are on the device, as PyTorch makes them beside what is indexed."""
    parts = index if isinstance(index, tuple) else (index,)
    moved = tuple(
        torch.tensor(part, dtype=None if part else torch.int64).to(FOREIGN) if isinstance(part, list) else part
        for part in parts
    )
    return moved if isinstance(index, tuple) else moved[0]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device where a GPU would have it."""
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    foreign = [value for value in given if isinstance(value, ForeignTensor)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if not foreign and target != FOREIGN:
        return func(*args, **kwargs)
    _check(func, given, foreign, kwargs)
    if target == FOREIGN:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_inference = torch.is_inference_mode_enabled() and all(value.is_inference() for value in foreign)
    # a view is of the kind of its base; what is differentiated are the tensors outside
    with torch.inference_mode(is_inference), torch.no_grad():
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if func._schema.is_mutable:
            return _same(func, args, kwargs, result)
        if isinstance(result, bool | int | float) or (target is not None and target != FOREIGN):
            copied[_place(func)] += 1
            return result
        return tree_map(_wrapped, result)


def _check(func: Any, given: list[Tensor], foreign: list[ForeignTensor], kwargs: dict[str, Any]) -> None:
    """Note what a GPU would refuse."""
    strays = [value for value in given if not isinstance(value, ForeignTensor) and value.dim() > 0]
    generator = kwargs.get("generator")
    if (foreign and strays and func not in COPIES) or (generator is not None and generator.device != FOREIGN):
        mixed[_place(func)] += 1


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What was given to be written to; a result that is none of it is new."""
    written = [
        args[place] if place < len(args) else kwargs[argument.name]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if isinstance(result, Tensor) and len(written) == 1:
        return written[0]
    return tree_map(_wrapped, result)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, ForeignTensor) else value


def _wrapped(value: Any) -> Any:
    return ForeignTensor(value) if isinstance(value, Tensor) and not isinstance(value, ForeignTensor) else value


def _place(func: Callable[..., Any]) -> str:
    """Where the package asked for an operation: file:line, and the operation."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            return f"{path.relative_to(SOURCES)}:{frame.f_lineno} {func}"
    return f"a test: {func}"

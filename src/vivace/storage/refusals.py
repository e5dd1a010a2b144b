"""What cannot be asked of a store: its weights are as they were converted, and stream to the kernels they lie for."""

from __future__ import annotations

import torch

from vivace.checkpoint.load import choose_device, choose_dtype
from vivace.errors import UnsupportedError
from vivace.kernels.choice import KernelChoice


def check_weights(kept: str, device: str) -> None:
    """Refuse another format of the matrices than the one they were converted to, and other devices.

    Raises:
        UnsupportedError: says what was asked.
    """
    if choose_device(device).type != "cpu":
        raise UnsupportedError(f"a store is read into the memory of the CPU, {device} was asked for; leave it out")
    if kept != "bf16":
        raise UnsupportedError(f"a store keeps its weights as they were converted, {kept} was asked for; leave it out")


def check_screen(asked: bool | None) -> None:
    """Refuse a screened head for weights of a store.

    Raises:
        UnsupportedError: one was asked for.
    """
    if asked:
        raise UnsupportedError(
            "a store keeps its head as it was converted, --screened-head was asked for; leave it out"
        )


def check_ranks(are_several: bool) -> None:
    """Refuse several ranks for a store.

    Raises:
        UnsupportedError: there are several.
    """
    if are_several:
        raise UnsupportedError("a store is not shared among ranks; name its checkpoint, or leave out --parallel")


def check_dtype(asked: str, found: torch.dtype) -> None:
    """Refuse another precision than a store has.

    Raises:
        UnsupportedError: names both.
    """
    if asked != "auto" and choose_dtype(asked, found, torch.device("cpu")) != found:
        raise UnsupportedError(f"this store holds {found}, {asked} was asked for; convert it with --dtype {asked}")


def torch_only(asked: str) -> KernelChoice:
    """Return what runs weights that are read while they are used, and do not lie as native kernels read them.

    Raises:
        UnsupportedError: native kernels were asked for by name.
    """
    if asked not in ("auto", "torch"):
        raise UnsupportedError(
            f"{asked} kernels cannot stream this store: convert it with --kernels {asked}, give --kernels torch, "
            "or more memory"
        )
    return KernelChoice("torch", "this store was not converted for native kernels", None)

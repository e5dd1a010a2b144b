"""Choice of the kernels, those that are asked for or the best that this processor runs, with the reason."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from vivace.errors import ConfigError, DependencyError, UnsupportedError, nearest
from vivace.kernels.library import BODIES, open_library, runnable
from vivace.kernels.native import NativeBody

GRAPHS = "graphs"
"""PyTorch's and Triton's kernels on a GPU, a whole step recorded as one CUDA graph."""
NAMES = ("auto", "torch", *BODIES, GRAPHS)
LISTED = ", ".join(NAMES[:-1]) + " or " + NAMES[-1]
LACKING = {"amx": "processor, its system or the compiler that built the library"}
"""What kernels need besides the processor's instructions, for the message that they cannot run."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that were chosen, and the reason."""

    name: str
    """"torch", "avx2", "avx512", "amx" or "graphs"."""
    reason: str
    """Why these kernels were chosen."""
    body: NativeBody | None
    """The native kernels; None for PyTorch."""


CPU = torch.device("cpu")


def choose(asked: str = "auto", *, device: torch.device = CPU, features: Set[str] | None = None) -> KernelChoice:
    """Choose the kernels.

    Args:
        asked: "auto" chooses the best that run on this device; any other name chooses exactly those.
        device: where the model lies; native kernels run on the CPU.
        features: kernels that the processor can run; None asks the processor.

    Raises:
        ConfigError: there are no kernels of this name.
        DependencyError: native kernels are asked for and are not built.
        UnsupportedError: this processor lacks the instructions that the kernels need, or the model is not in its
            memory.
    """
    if asked not in NAMES:
        raise ConfigError(f"kernels must be {LISTED}, found {asked!r}{nearest(asked, NAMES)}")
    if asked == "torch":
        return KernelChoice("torch", "asked for", None)
    if asked == GRAPHS:
        if device.type == "cpu":
            raise UnsupportedError("graphs are for a GPU; add --device cuda, or leave --kernels out")
        return KernelChoice(GRAPHS, "asked for", None)
    if device.type != "cpu":
        if asked != "auto":
            raise UnsupportedError(f"the {asked} kernels run on the CPU, the model is on {device}; leave out --kernels")
        return KernelChoice(GRAPHS, "the fastest on a GPU", None)
    try:
        library = open_library()
    except DependencyError as error:
        if asked != "auto":
            raise
        return KernelChoice("torch", str(error), None)
    able = runnable(library) if features is None else features
    if asked != "auto":
        if asked not in able:
            raise UnsupportedError(
                f"this {LACKING.get(asked, 'processor')} cannot run the {asked} kernels; use --kernels auto"
            )
        return KernelChoice(asked, "asked for", NativeBody(asked, library))
    for name in reversed(BODIES):
        if name in able:
            return KernelChoice(name, "the best this processor runs", NativeBody(name, library))
    return KernelChoice("torch", "this processor has neither AVX2 nor AVX-512 with BF16", None)

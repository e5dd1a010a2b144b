"""Which body runs the hot operations: asked for or chosen from what this processor has, and said either way."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from vivace.errors import ConfigError, DependencyError, UnsupportedError, nearest
from vivace.kernels.library import BODIES, open_library, runnable
from vivace.kernels.native import NativeBody

NAMES = ("auto", "torch", *BODIES)
LACKING = {"amx": "processor, its system or the compiler that built the library"}
"""What a body may lack beside the processor's instructions."""


@dataclass(frozen=True)
class Choice:
    """The body of the hot operations and why it is this one."""

    name: str
    """"torch", "avx2", "avx512" or "amx"."""
    reason: str
    body: NativeBody | None
    """None for the torch reference."""


def choose(asked: str = "auto", *, features: Set[str] | None = None) -> Choice:
    """Decide once.

    Args:
        asked: "auto" takes the best that runs here, any other name exactly that one.
        features: bodies the processor can run; None looks.

    Raises:
        ConfigError: no such name.
        DependencyError: the native kernels are asked for and not built.
        UnsupportedError: this processor lacks the instructions asked for.
    """
    if asked not in NAMES:
        raise ConfigError(f"kernels must be auto, torch, avx2, avx512 or amx, found {asked!r}{nearest(asked, NAMES)}")
    if asked == "torch":
        return Choice("torch", "asked for", None)
    try:
        library = open_library()
    except DependencyError as error:
        if asked != "auto":
            raise
        return Choice("torch", str(error), None)
    able = runnable(library) if features is None else features
    if asked != "auto":
        if asked not in able:
            raise UnsupportedError(
                f"this {LACKING.get(asked, 'processor')} cannot run the {asked} kernels; use --kernels auto"
            )
        return Choice(asked, "asked for", NativeBody(asked, library))
    for name in reversed(BODIES):
        if name in able:
            return Choice(name, "the best this processor runs", NativeBody(name, library))
    return Choice("torch", "this processor has neither AVX2 nor AVX-512 with BF16", None)

"""vivace: a Hugging Face language model answers faster, and the measurement that its answers did not change.

    engine = vivace.load("path/or/hub-id")
    print(engine.generate("Describe: name[Green Man], food[Indian]")[0].text)

Importing the package does not import torch; what needs it is loaded when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError

if TYPE_CHECKING:
    from vivace.engine import Chunk, Engine, Result, load

__version__ = "0.1.0"

__all__ = ["Chunk", "Engine", "Result", "VivaceError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from vivace import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'vivace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

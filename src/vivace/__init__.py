"""Make a Hugging Face language model answer faster, and measure that its answers did not change.

Importing the package does not import torch; what needs it is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError

if TYPE_CHECKING:
    from vivace.answer import Chunk, Result
    from vivace.conversation import Conversation
    from vivace.engine import Engine, Options, load
    from vivace.transformers_bridge import custom_generate

__version__ = "0.1.0"

_HOMES = {"Conversation": "vivace.conversation", "custom_generate": "vivace.transformers_bridge"}
"""Modules of public names that are not in ``vivace.engine``."""

__all__ = [
    "Chunk",
    "Conversation",
    "Engine",
    "Options",
    "Result",
    "VivaceError",
    "__version__",
    "custom_generate",
    "load",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "vivace.engine")), name)
    raise AttributeError(f"module 'vivace' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__

"""vivace: a Hugging Face language model answers faster, and the measurement that its answers did not change.

Importing the package does not import torch; what needs it is loaded when first asked for.
"""

from __future__ import annotations

from vivace.errors import VivaceError

__version__ = "0.1.0"

__all__ = ["VivaceError", "__version__"]

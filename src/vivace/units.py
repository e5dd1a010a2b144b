"""Sizes and durations written for people: ``"4GiB"``, ``"20ms"``.

Sizes are bytes; the binary units (KiB, MiB, GiB, TiB) are powers of 1024, the decimal ones (kB, MB, GB, TB)
powers of 1000. A bare number is bytes. Durations are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vivace.errors import ConfigError, shown

BYTES: Mapping[str, int] = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
"""Number of bytes in each unit."""
_TOO_MANY = 1 << 63
"""Number of bytes that no machine addresses."""

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes in ``"4GiB"``, ``"512 MB"`` or ``4096``, rounded down.

    Raises:
        ConfigError: the text is not a non-negative number with one of the known units, or more than 64 bits can hold.
    """
    is_long = isinstance(text, int) and abs(text) >= _TOO_MANY
    match = None if is_long else _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] and match[2] not in BYTES):
        raise ConfigError(
            f"expected a size such as 4GiB, 512MB or 4096, found {shown(text)}; units: {', '.join(BYTES)}"
        )
    number = float(match[1]) * (BYTES[match[2]] if match[2] else 1)
    if number >= _TOO_MANY:
        raise ConfigError(f"expected a size such as 4GiB, found {shown(text)}, which is more than any machine has")
    return int(number)


def format_bytes(num_bytes: int) -> str:
    """Format a size in the largest binary unit in which it is at least 1: ``"4.0 GiB"``, ``"512 B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(num_bytes) >= BYTES[unit]:
            return f"{num_bytes / BYTES[unit]:.1f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Format a duration: ``"850 µs"``, ``"20.0 ms"``, ``"1.50 s"``, ``"3 min 20 s"``, ``"2 h 05 min"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

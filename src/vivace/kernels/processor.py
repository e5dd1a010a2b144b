"""The name of this machine's processor, by which measurements of it are told from those of others."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_KEYS = ("model name", "cpu family", "model")


def processor_name() -> str:
    """Return the processor's name as the system reports it, with family and model, since rented machines hide the exact
    type.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text() if info.is_file() else ""
    found = {key: match[1].strip() for key in _KEYS if (match := re.search(rf"^{key}\s*:\s*(.+)$", lines, re.M))}
    if "model name" not in found:
        return platform.processor() or "unknown"
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {found[key]}" for key in _KEYS[1:] if key in found)
    return f"{found['model name']} ({numbers})" if numbers else found["model name"]

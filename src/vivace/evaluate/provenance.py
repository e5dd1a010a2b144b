"""Where a number comes from: code, versions, machine. Stored with every result."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vivace.kernels.choice import choose

PACKAGES = ("vivace", "torch", "transformers", "tokenizers", "safetensors", "numpy", "llama-cpp-python")
_CPU_KEYS = ("model name", "cpu family", "model")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Provenance:
    """What has to be the same for two numbers to be comparable."""

    commit: str | None
    """Of the source tree; ``+changes`` when files differ from it; None for an installed package."""
    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cores: int
    num_threads: int
    device: str
    best_kernels: str
    """The best this processor runs, whatever was measured."""
    cache_bytes: int | None
    """Of its largest cache; None where the system does not say."""


def provenance(device: torch.device) -> Provenance:
    """Code, versions and machine as they are now."""
    return Provenance(
        commit=_commit(),
        python=sys.version.split()[0],
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu(),
        num_cores=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        best_kernels=choose("auto").name,
        cache_bytes=_cache_bytes(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name as the system gives it, with family and model, since hired machines hide the number."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text() if info.is_file() else ""
    found = {key: match[1].strip() for key in _CPU_KEYS if (match := re.search(rf"^{key}\s*:\s*(.+)$", lines, re.M))}
    if "model name" not in found:
        return platform.processor() or "unknown"
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {found[key]}" for key in _CPU_KEYS[1:] if key in found)
    return f"{found['model name']} ({numbers})" if numbers else found["model name"]


def _cache_bytes() -> int | None:
    """Size of the first core's largest cache, as Linux gives it: ``32768K``."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=None)


def _commit() -> str | None:
    """Short commit id of the source tree this package runs from."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()

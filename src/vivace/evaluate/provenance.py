"""The provenance of a number: code, versions and machine. It is stored with every result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vivace.kernels.choice import choose
from vivace.kernels.processor import processor_name

PACKAGES = ("vivace", "torch", "transformers", "tokenizers", "safetensors", "numpy", "llama-cpp-python")
"""Packages whose versions are recorded."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Provenance:
    """The facts that must be the same for two numbers to be comparable."""

    commit: str | None
    """Commit of the source tree, with ``+changes`` if files differ from it; None for an installed package."""
    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    """Name of the processor, with its family and model."""
    num_cores: int
    num_threads: int
    device: str
    """Name of the accelerator, or "cpu"."""
    best_kernels: str
    """The fastest kernels that this processor can run, whichever were measured."""
    cache_bytes: int | None
    """Size of the processor's largest cache; None if the system does not report it."""


def provenance(device: torch.device) -> Provenance:
    """Return the provenance of numbers measured now."""
    return Provenance(
        commit=_commit(),
        python=sys.version.split()[0],
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
        system=f"{platform.system()} {platform.machine()}",
        cpu=processor_name(),
        num_cores=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        best_kernels=choose("auto").name,
        cache_bytes=_cache_bytes(),
    )


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache_bytes() -> int | None:
    """Return the size of the first core's largest cache, which Linux reports as ``32768K``."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=None)


def _commit() -> str | None:
    """Return the short commit id of the source tree that this package runs from."""
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
    """Run a git command and return its output."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()

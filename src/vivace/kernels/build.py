"""Compiles the native kernels: run by ``pip install``, and by hand as ``python -m vivace.kernels.build``.

This file uses the standard library only and does not import the package, because the build hook loads it by its path
where neither torch nor vivace is installed yet. The kernels of each instruction set are one source file with compiler
flags of its own. Nothing is tuned to the machine that compiles, so a built package runs on another one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = Path(__file__).parent / "libvivace_kernels.so"

AVX2 = ("-mavx2", "-mfma")
F16C = "-mf16c"  # every processor with AVX2 has it
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
UNITS: dict[str, tuple[str, ...]] = {
    "entry.cpp": (),
    "pool.cpp": (),
    "checksum.cpp": (),
    "reader.cpp": (),
    "wire.cpp": (),
    "mixture.cpp": (),
    "mixture_float32.cpp": (),
    "body_avx2.cpp": (*AVX2, F16C),
    "body_avx2vnni.cpp": (*AVX2, F16C, "-mavxvnni"),
    "body_avx512.cpp": AVX512,
    "body_avx2_float32.cpp": (*AVX2, F16C),
    "body_avx512_float32.cpp": AVX512,
    "body_amx.cpp": (*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
MAY_LACK = {"body_amx.cpp": "amx"}
"""Units that a compiler may be unable to build with their flags, and the kernels that are missing without them. Such a
unit is compiled without its flags, which leaves it empty."""

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
"""``-ffp-contract=off`` keeps the compiler from fusing a product and a sum in one copy of an expression and not in
another, which would give results that differ in their last bit."""


class BuildError(Exception):
    """The native kernels cannot be compiled; the message is one sentence with the reason."""


def fingerprint() -> str:
    """Return a hash of the sources; a library contains the hash of those it was compiled from."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """Return the path of the C++ compiler: ``$CXX`` if it is set, otherwise one of the usual names.

    Raises:
        BuildError: there is no compiler, or there are no kernels for this kind of machine.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or os.name != "posix":
        raise BuildError(f"there is no native body for {platform.system()} on {platform.machine()} yet")
    named = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    for name in named:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler was found (looked for {', '.join(named)})")


def compile_library(target: Path = LIBRARY, extra: Sequence[str] = ()) -> Path:
    """Compile and link the library; the file is replaced only when it is complete.

    Args:
        target: file to write.
        extra: further flags for compiling and linking, such as those of sanitizers.

    Raises:
        BuildError: there is no compiler, or compiling failed.
    """
    tool = compiler()
    identity = f'-DVIVACE_SOURCES="{fingerprint()}"'
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = {unit: f"{folder}/{unit}.o" for unit in UNITS}

        def compile_unit(unit: str) -> None:
            rest = (*extra, identity, "-c", str(SOURCES / unit), "-o", objects[unit])
            try:
                _call(tool, *FLAGS, *UNITS[unit], *rest)
            except BuildError as error:
                if unit not in MAY_LACK:
                    raise
                sys.stderr.write(f"{error}; the library is built without the {MAY_LACK[unit]} kernels\n")
                _call(tool, *FLAGS, *rest)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_unit, UNITS))  # raises what a unit raised
        linked = Path(folder, target.name)
        _call(tool, "-shared", "-pthread", *extra, *objects.values(), "-o", str(linked))
        linked.replace(target)
    return target


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} did not start: {error}") from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise BuildError(f"{command[0]} could not compile the native bodies: {lines[0] if lines else error}") from error


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{compile_library()}\n")
    except BuildError as error:
        sys.exit(f"{error}; the torch bodies run without it")

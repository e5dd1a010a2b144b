"""The native bodies under the address and undefined-behaviour sanitizers: the tests of products, attention and chains.

A copy of the package is built with them, so that the one in use stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.kernels import build

ROOT = Path(__file__).parents[2]
FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
TESTS = (
    *(f"kernels/test_{name}.py" for name in ("native", "low_bit", "palette", "exact", "native_bits", "pool")),
    *(
        "kernels/test_single_rows.py",
        "kernels/test_neurons.py",
        "core/test_packed.py",
        "methods/multirate/test_chain.py",
    ),
    *("methods/multirate/test_low_bit.py", "decode/test_multi_step.py", "methods/multistream/test_steps_at_once.py"),
    *("storage/experts/foresight/test_objective.py", "storage/io/test_async_reader.py"),
)


def preloaded(tool: str) -> str:
    """The sanitizers' libraries, which an interpreter without them has to load first."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [tool, f"-print-file-name={name}"]
        found.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("this compiler has no sanitizers that can be loaded first")
    return " ".join(found)


@pytest.mark.slow
def test_no_access_out_of_bounds_and_nothing_undefined(tmp_path: Path) -> None:
    try:
        tool = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    source = Path(build.__file__).parents[1]
    shutil.copytree(source, tmp_path / "vivace", ignore=shutil.ignore_patterns("*.so", "__pycache__", "tmp*"))
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = f"from vivace.kernels.build import compile_library; compile_library(extra={FLAGS!r})"
    subprocess.run([sys.executable, "-c", code], env=paths, check=True)
    settings = {
        "LD_PRELOAD": preloaded(tool),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Calls of several threads have tests of their own; elsewhere they only wait for each other on busy cores.
        "OMP_NUM_THREADS": "1",
    }
    # A forked child of a sanitized process may stop in the allocator, whose locks it got as they were.
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-k", "not fork", "-n", "2"]
    command += ["-o", f"pythonpath={tmp_path} {ROOT}"]  # else the package in use would be tested
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    done = subprocess.run([*command, *tests], env={**paths, **settings}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

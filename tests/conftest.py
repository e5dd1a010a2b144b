"""Settings shared by every test: offline, and few threads so that suites may run side by side."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread each, whoever reads this first: with pytest-xdist the process that only hands out tests does, and what it
# sets its workers inherit. Two workers of two threads on two cores wait for each other's turns, three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Build kernels that are missing or stale as an installation would, once and before anybody opens them.

    A process that has opened a stale library gets the same one again, whatever lies in its place since.
    """
    if hasattr(config, "workerinput"):  # one of the workers, which begin when this is done
        return
    from vivace.kernels.build import LIBRARY, BuildError, compile_library, fingerprint

    if not LIBRARY.is_file() or fingerprint().encode() not in LIBRARY.read_bytes():
        with suppress(BuildError):
            compile_library()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow where their test says so, given their parameters (``@pytest.mark.slow_where``)."""
    for item in items:
        for mark in item.iter_markers("slow_where"):
            if mark.args[0](**item.callspec.params):  # type: ignore[attr-defined]
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def short_timings() -> Iterator[None]:
    """What was trained is timed on two prompts and a few tokens; how fast it is, is nobody's concern here."""
    from vivace.recipes import frozen

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frozen, "NUM_MEASURED", 2)
        patched.setattr(frozen, "MEASURED_TOKENS", 16)
        yield


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders for what the package keeps between runs."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, caches: Iterator[Path]) -> None:
    """No test reads what another has measured, or writes to the user's cache."""
    monkeypatch.setenv("VIVACE_CACHE_DIR", str(next(caches)))


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    from vivace.errors import DependencyError
    from vivace.kernels.build import BuildError, compiler
    from vivace.kernels.library import open_library

    try:
        return open_library()
    except DependencyError:
        try:
            compiler()
        except BuildError as error:
            pytest.skip(f"native kernels: {error}")
        raise


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Callable[[], None]:
    """Compute with one thread, whatever the environment says: models this small only wait for a second one."""
    import torch  # reads OMP_NUM_THREADS once, so after it was set above

    torch.set_num_threads(1)
    return lambda: torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def leave_one_thread(one_thread: Callable[[], None]) -> Iterator[None]:
    """A test may take more threads; the next one has a single one again."""
    yield
    one_thread()


@pytest.fixture
def native() -> None:
    """Only where native kernels run, which read a prompt row by row; others read it in chunks."""
    from vivace.kernels.choice import choose

    if choose("auto").body is None:
        pytest.skip("no native kernels run here")


BODIES = ("avx2", "avx512", "amx")


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest, library: ctypes.CDLL) -> object:
    """Each native body this processor runs."""
    return _body(request.param, library)


@pytest.fixture(params=["torch", *BODIES])
def body_or_none(request: pytest.FixtureRequest) -> object | None:
    """PyTorch, which is None, and each native body."""
    return None if request.param == "torch" else _body(request.param, request.getfixturevalue("library"))


def _body(name: str, library: ctypes.CDLL) -> object:
    from vivace.kernels.library import runnable
    from vivace.kernels.native import NativeBody

    if name not in runnable(library):
        pytest.skip(f"this processor does not run the {name} kernels")
    return NativeBody(name, library)


@pytest.fixture(scope="session")
def deep() -> Callable[..., Any]:
    """A frozen decoder of six layers, by precision."""
    import torch

    from tests.decode.tiny_decoders import build

    made: dict[torch.dtype, Any] = {}

    def get(dtype: torch.dtype) -> Any:
        if dtype not in made:
            with torch.inference_mode(False):  # tests that train get it too, whoever asks first
                made[dtype] = build(dtype, num_layers=6, seed=3).requires_grad_(False)
        return made[dtype]

    return get

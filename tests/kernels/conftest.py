"""The compiled bodies for tests: built where they are missing or stale, as an installation would."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from vivace.errors import DependencyError
from vivace.kernels.build import BuildError, compile_library
from vivace.kernels.library import BODIES, open_library, runnable
from vivace.kernels.native import NativeBody


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    try:
        return open_library()
    except DependencyError:
        try:
            compile_library()
        except BuildError as error:
            pytest.skip(f"native bodies: {error}")
        return open_library()


@pytest.fixture(params=sorted(BODIES))
def body(request: pytest.FixtureRequest, library: ctypes.CDLL) -> NativeBody:
    if request.param not in runnable(library):
        pytest.skip(f"this processor does not run the {request.param} body")
    return NativeBody(request.param, library)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield

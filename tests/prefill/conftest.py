"""A tiny model with a long context, on all kernels and in both dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

import vivace
from tests.prefill.setting import KINDS, LAYERS
from tests.tiny_checkpoints import make_checkpoint
from vivace.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), context=512, layers=LAYERS)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    kernels, dtype = request.param
    return vivace.load(folder, kernels=kernels, dtype=dtype)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Engine:
    return vivace.load(folder, kernels="torch", dtype="float32")

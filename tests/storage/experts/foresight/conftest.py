"""Mixtures of each family, and what their experts are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.families import make
from tests.storage.experts.foresight.foreseen import Heard, listening
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder


@pytest.fixture(scope="module", params=["mixtral", "olmoe", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A small mixture of each family."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder)
    return load_decoder(folder)


@pytest.fixture
def heard(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What the experts of that mixture are told."""
    return listening(model, monkeypatch)

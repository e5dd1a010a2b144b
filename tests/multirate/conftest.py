"""Accelerators over the tiny decoders of the decoding tests, and mixtures of each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.multirate.foreseen import Heard, listening
from tests.parity.families import make
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.multirate.config import MultirateConfig
from vivace.multirate.residual import Accelerator


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def accelerator(deep: Callable[[torch.dtype], Decoder]) -> Callable[..., Accelerator]:
    """An accelerator, untrained (``noise`` 0) or random."""

    def get(dtype: torch.dtype, noise: float = 0.0, **fields: object) -> Accelerator:
        torch.manual_seed(5)
        made = Accelerator(MultirateConfig(**{"gate": 3, "rank": 4, "bottleneck": 8, **fields}), deep(dtype).config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        return made.to(dtype).requires_grad_(False)

    return get


@pytest.fixture(scope="module", params=["mixtral", "olmoe", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A small mixture of each family; files about other models have one of their own."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder)
    return load_decoder(folder)


@pytest.fixture
def heard(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What the experts of that mixture are told."""
    return listening(model, monkeypatch)

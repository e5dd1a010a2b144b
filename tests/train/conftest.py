"""A tiny decoder, a tokenizer of its own, and pairs to learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.tiny import PAIRS, tiny_decoder
from vivace.checkpoint.bpe import save_bpe, train_bpe
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.core.model import Decoder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_bpe(train_bpe([text for pair in PAIRS for text in pair], 400), folder, 256)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}', encoding="utf-8")
    return load_tokenizer(folder)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return tiny_decoder()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"

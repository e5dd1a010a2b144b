"""Dense models as mixtures: the same function while the copies are alike, and a checkpoint transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError, UnsupportedError

TOKENS = torch.randint(4, 300, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"))


def logits(model: Decoder) -> torch.Tensor:
    step = Step.dense(*TOKENS.shape)
    with torch.inference_mode():
        return model.head(model.run(model.embed(TOKENS.reshape(-1), step), step))


def test_without_noise_it_computes_the_same(dense: Path, tmp_path: Path) -> None:
    mixture = load_decoder(upcycle_checkpoint(dense, tmp_path / "moe", num_experts=4, noise=0.0))
    torch.testing.assert_close(logits(mixture), logits(load_decoder(dense)), rtol=1e-5, atol=1e-5)


def test_noise_tells_the_copies_apart(dense: Path, tmp_path: Path) -> None:
    mixture = load_decoder(upcycle_checkpoint(dense, tmp_path / "moe", num_experts=3, noise=0.2))
    source = dict(load_decoder(dense).named_parameters())["layers.0.feed_forward.up.weight"]
    copies = [p for name, p in mixture.named_parameters() if name.startswith("layers.0.") and "up.weight" in name]
    assert len(copies) == 3
    for copy in copies:
        assert float((copy - source).std() / source.std()) == pytest.approx(0.2, rel=0.1)


def test_transformers_reads_it(dense: Path, tmp_path: Path) -> None:
    folder = upcycle_checkpoint(dense, tmp_path / "moe", num_experts=4, noise=0.1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    with torch.inference_mode():
        expected = theirs(TOKENS).logits.reshape(-1, theirs.config.vocab_size)
    torch.testing.assert_close(logits(load_decoder(folder)), expected, rtol=1e-4, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template


def test_refusals(dense: Path, tmp_path: Path) -> None:
    for wrong in (
        {"num_experts": 2, "top_k": 2},
        {"top_k": 0},
        {"noise": -0.1},
        {"noise": float("nan")},
        {"noise": float("inf")},
    ):
        with pytest.raises(ConfigError, match="1 <= top_k < num_experts and noise >= 0"):
            upcycle_checkpoint(dense, tmp_path / "no", **wrong)
    for seed in (1 << 63, -(1 << 63) - 1, 10**5000):
        with pytest.raises(ConfigError, match="seed must be an integer of 64 bits"):
            upcycle_checkpoint(dense, tmp_path / "no", seed=seed)
    with pytest.raises(ConfigError, match="is the model itself"):
        upcycle_checkpoint(dense, dense)
    mixture = upcycle_checkpoint(dense, tmp_path / "moe", num_experts=3)
    with pytest.raises(UnsupportedError, match="only Llama and Mistral"):
        upcycle_checkpoint(mixture, tmp_path / "no")
    assert not (tmp_path / "no").exists()

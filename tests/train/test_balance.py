"""Experts kept equally busy: the term itself, and that training on it makes them so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import VOCAB, make
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.train.config import LoopConfig
from vivace.train.data import TokenBatch
from vivace.train.next_token import BalancedNextToken, NextToken, _unevenness


@pytest.fixture
def mixture(tmp_path: Path) -> Decoder:
    make("mixtral").save_pretrained(tmp_path)
    model = load_decoder(tmp_path)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


def batch() -> TokenBatch:
    tokens = torch.randint(1, VOCAB, (4, 24), generator=torch.Generator().manual_seed(0))
    return TokenBatch(tokens, torch.ones(4, 24, dtype=torch.bool))


def test_it_is_one_when_all_are_equally_busy() -> None:
    logits = torch.eye(4).repeat(3, 1)
    assert float(_unevenness(logits, 1)) == pytest.approx(1.0)
    assert float(_unevenness(20 * torch.eye(4)[:1].repeat(8, 1), 1)) == pytest.approx(4.0, abs=1e-3)


def test_training_on_it_evens_them_out(mixture: Decoder) -> None:
    objective = BalancedNextToken(mixture, weight=1.0)
    routers = [p for name, p in mixture.named_parameters() if name.endswith("router.weight")]
    optimiser = torch.optim.Adam(routers, 0.01)
    seen = []
    for _ in range(36):
        optimiser.zero_grad()
        for loss, told in objective.losses(mixture, batch()):
            loss.backward()
            seen += [told["uneven"]] if "uneven" in told else []
        optimiser.step()
    assert seen[-1] - 1 < (seen[0] - 1) / 2


def test_without_gradients_it_is_plain(mixture: Decoder) -> None:
    with torch.no_grad():
        plain = [float(loss) for loss, _ in NextToken(mixture).losses(mixture, batch())]
        balanced = [float(loss) for loss, _ in BalancedNextToken(mixture, weight=1.0).losses(mixture, batch())]
    assert plain == balanced


@pytest.mark.parametrize("wrong", [{"balance": -0.1}, {"balance": 0.1, "recompute": True}])
def test_recipes_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="balance is for mixtures"):
        DecoderRecipe("decoder", (Stage(LoopConfig(steps=200)),), **wrong)  # type: ignore[arg-type]

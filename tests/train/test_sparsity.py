"""ReLU models that leave neurons alone: the term itself, and that training on it leaves fewer active."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import VOCAB, make
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.storage.neurons.outputs import feeds_of
from vivace.train.config import LoopConfig
from vivace.train.data import TokenBatch
from vivace.train.next_token import SparseNextToken, _hoyer

RECIPE = DecoderRecipe("decoder", (Stage(LoopConfig(steps=200)),), sparsity=0.1)


def model_with_relu(folder: Path) -> Decoder:
    source = make("llama")
    source.config.hidden_act = "relu"
    source.save_pretrained(folder)
    model = load_decoder(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


def batch() -> TokenBatch:
    tokens = torch.randint(1, VOCAB, (4, 24), generator=torch.Generator().manual_seed(0))
    return TokenBatch(tokens, torch.ones(4, 24, dtype=torch.bool))


def share_active(model: Decoder) -> float:
    shares = []
    for feed, (x,) in feeds_of(model, batch().tokens.tolist()):
        gates = feed.up(x).chunk(2, -1)[0]
        shares.append(float((gates > 0).float().mean()))
    return sum(shares) / len(shares)


def test_it_counts_neurons_that_are_equally_active() -> None:
    active = torch.zeros(3, 16)
    active[0, :4], active[1, :8] = 0.5, 7.0
    assert float(_hoyer(active)) == pytest.approx((4 / 16 + 8 / 16 + 0) / 3)


def test_training_on_it_leaves_fewer_active(tmp_path: Path) -> None:
    shares = []
    for weight in (0.0, 1.0):
        model = model_with_relu(tmp_path)
        objective = SparseNextToken(model, weight=weight)
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(60):
            optimiser.zero_grad()
            for loss, _ in objective.losses(model, batch()):
                loss.backward()
            optimiser.step()
        shares.append(share_active(model))
    assert shares[1] < shares[0] / 2


def test_only_models_with_relu(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="for models with relu, this one has silu"):
        RECIPE.objective(load_decoder(tmp_path))


@pytest.mark.parametrize("wrong", [{"sparsity": -0.1}, {"sparsity": 0.1, "recompute": True}])
def test_recipes_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="sparsity is at least 0"):
        DecoderRecipe("decoder", (Stage(LoopConfig(steps=200)),), **wrong)  # type: ignore[arg-type]

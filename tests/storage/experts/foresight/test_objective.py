"""Foresight: targets above where it stands, the plain model's bits, causality, and a loss that teaches routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.storage.experts.foresight.foreseen import Heard, batch, foresight
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.errors import ConfigError, UnsupportedError
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightLoss, ForesightPlan
from vivace.storage.experts.foresight.drafter import ForesightForwardPass
from vivace.storage.experts.foresight.objective import ForesightObjective
from vivace.storage.experts.foresight.weights import Foresight
from vivace.train.data import TokenBatch


@pytest.mark.parametrize("rate", [1.1, 1.25, 1.5, 2, 2.2, 2.5, 3, 5])
@pytest.mark.parametrize("num_layers", [3, 8, 16, 24, 34])
def test_every_layer_but_the_first_is_foreseen_once_from_below(rate: float, num_layers: int) -> None:
    config = ForesightConfig(rate=rate)
    targets = [(n, m) for n in range(config.depth(num_layers) + 1) for m in config.targets(n, num_layers)]
    assert [m for _, m in targets] == list(range(1, num_layers))
    assert all(m > n for n, m in targets), "a guess from at or above its layer comes too late"


def test_training_raises_recall_and_leaves_the_model_alone(model: Decoder) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seeing = foresight(model, bottleneck=32)
    objective = ForesightObjective(seeing, ForesightLoss())
    optimiser = torch.optim.AdamW(seeing.parameters(), 0.01)
    losses, recalls = [], []
    for _ in range(40):
        optimiser.zero_grad()
        ((loss, seen),) = objective.losses(model, batch())
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        recalls.append(seen["recall"])
    assert losses[-1] < 0.8 * losses[0]
    assert recalls[-1] > recalls[0] + 0.05
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("rate", [None, 1.5])
def test_training_teaches_routers_to_be_asked_early(model: Decoder, rate: float | None) -> None:
    """Those that the untrained ask as they are begin from the router itself; so do those of p."""
    seeing = foresight(model, rate=rate, leads=(1,))
    assert seeing.near is not None
    objective = ForesightObjective(seeing, ForesightLoss())
    trained = [seeing.near, *([] if seeing.far is None else [seeing.far])]
    optimiser = torch.optim.AdamW(trained, 0.01)
    said: list[Mapping[str, float]] = []
    for _ in range(60):
        optimiser.zero_grad()
        ((loss, seen),) = objective.losses(model, batch())
        loss.backward()
        optimiser.step()
        said.append(seen)
    assert list(said[0]) == [*(["recall"] if rate else []), "lead_1"]
    for name in said[0]:
        assert said[-1][name] > said[0][name] + 0.03, name


def decoded(model: Decoder, forward: ForesightForwardPass, text: TokenBatch, heard: Heard) -> None:
    """One token after another; from here on nothing else is heard."""
    heard.clear()
    cache = model.new_cache(1, 16)
    with torch.inference_mode():
        for token in text.tokens[0, :-1].tolist():
            forward.run(model, Draft.committed_only({0: [token]}), cache)
            cache.commit([0], [[0]])


def test_the_loss_sees_what_decoding_sees(model: Decoder, heard: Heard) -> None:
    """Incremental equals dense: recall while decoding a text is the objective's."""
    assert model.config.moe is not None
    seeing, top_k = foresight(model, 0.05), model.config.moe.top_k
    text = batch(12, 1)
    with torch.inference_mode():
        ((_, seen),) = ForesightObjective(seeing, ForesightLoss()).losses(model, text)
    decoded(model, ForesightForwardPass(seeing, ForesightPlan()), text, heard)
    expected = [set(experts) for kind, _, experts in heard if kind == "expected"]
    ran = [set(experts) for kind, layer, experts in heard if kind == "ran" and layer > 0]
    mixtures = sum(model.config.is_moe(i) for i in range(model.config.num_layers))
    told = sum(len(a & b) for a, b in zip(_by_layer(expected, mixtures - 1), ran, strict=True)) / top_k
    assert told / (11 * mixtures) == pytest.approx(seen["recall"], abs=1e-6)


def test_recall_of_early_routers_is_that_of_decoding(model: Decoder, heard: Heard) -> None:
    """Of the residual so many layers below, and not of the embedding."""
    assert model.config.moe is not None
    seeing, text = foresight(model, 0.05, rate=None, leads=(1,)), batch(12, 1)
    with torch.inference_mode():
        ((_, seen),) = ForesightObjective(seeing, ForesightLoss()).losses(model, text)
    decoded(model, ForesightForwardPass(seeing, ForesightPlan(leads=(1,))), text, heard)
    told: dict[int, set[int]] = {}
    found = []
    for kind, layer, experts in heard:
        if kind == "expected":
            told[layer] = set(experts)
        elif layer in told:
            found.append(len(told.pop(layer).intersection(experts)) / model.config.moe.top_k)
    assert 0 < seen["lead_1"] < 1
    assert sum(found) / len(found) == pytest.approx(seen["lead_1"], abs=1e-6)


def _by_layer(expected: list[set[int]], count: int) -> list[set[int]]:
    """Guesses come in the order of their layers, pass by pass."""
    assert len(expected) == 11 * count
    return expected


def test_refusals(model: Decoder) -> None:
    with pytest.raises(ConfigError, match="rate must be above 1"):
        ForesightConfig(rate=1)
    with pytest.raises(ConfigError, match="rank and forecast must be >= 0"):
        ForesightConfig(bottleneck=0)
    with pytest.raises(ConfigError, match="one of them > 0"):
        ForesightLoss(0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="sees nothing"):
        ForesightConfig(rate=None)
    with pytest.raises(ConfigError, match="at least 1 layer"):
        ForesightPlan(leads=(0,))
    with pytest.raises(ConfigError, match="different numbers of layers"):
        ForesightConfig(leads=(2, 2))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        ForesightPlan(at_least=1.0)

    with pytest.raises(UnsupportedError, match="is for mixtures of experts"):
        Foresight(ForesightConfig(), replace(model.config, moe=None))

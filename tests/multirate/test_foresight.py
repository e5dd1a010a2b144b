"""Foresight: targets above where it stands, the plain model's bits, causality, and a loss that teaches routers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode.runs import finish
from tests.multirate.foreseen import Heard, batch, foresight
from vivace.core.model import Decoder
from vivace.core.moe import likeliest
from vivace.core.packed import pack_decoder
from vivace.core.seams import Draft
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError, UnsupportedError
from vivace.kernels.native import NativeBody
from vivace.multirate.foresight import (
    Foresight,
    ForesightClimb,
    ForesightConfig,
    ForesightLoss,
    ForesightObjective,
    ForesightPlan,
    Routers,
)


@pytest.mark.parametrize("rate", [1.1, 1.25, 1.5, 2, 2.2, 2.5, 3, 5])
@pytest.mark.parametrize("num_layers", [3, 8, 16, 24, 34])
def test_every_layer_but_the_first_is_foreseen_once_from_below(rate: float, num_layers: int) -> None:
    config = ForesightConfig(rate=rate)
    targets = [(n, m) for n in range(config.depth(num_layers) + 1) for m in config.targets(n, num_layers)]
    assert [m for _, m in targets] == list(range(1, num_layers))
    assert all(m > n for n, m in targets), "a guess from at or above its layer comes too late"


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("leads", [(), (1,), (2, 1)])
@pytest.mark.parametrize("fields", [{}, {"forecast": 8}, {"forecast": 8, "rate": None}], ids=["p", "both", "forecast"])
def test_the_text_is_the_plain_one(
    model: Decoder, noise: float, leads: tuple[int, ...], fields: dict[str, Any]
) -> None:
    plain, seeing = NoDrafts(), NoDrafts()
    seeing.traversal = ForesightClimb(foresight(model, noise, **fields), ForesightPlan(3, leads))
    results = []
    for drafter in (plain, seeing):
        requests = [Request((5, 9, 41, 7), 8, drafter, logprobs=True), Request((8, 3), 8, drafter, logprobs=True)]
        with torch.inference_mode():
            results.append(finish(Session(model, num_slots=2, capacity=32), requests))
    assert [(r.tokens, r.logprobs) for r in results[0]] == [(r.tokens, r.logprobs) for r in results[1]]


def test_routers_asked_together_say_what_each_says(model: Decoder) -> None:
    seen = foresight(model, 0.3)
    p, slow = torch.randn(2, 5, model.config.width, generator=torch.Generator().manual_seed(2)).unbind()
    layers = tuple(index for index in range(1, model.config.num_layers) if model.config.is_moe(index))
    with torch.no_grad():
        together = Routers.of(model, dict.fromkeys(layers, 2), seen, {}).logits(p, slow)
        for index, logits in zip(layers, together, strict=True):
            alone = model.layers[index].route(seen.at(index, p, slow))  # type: ignore[operator]
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
            for row in range(2):  # one row, as while decoding, and several
                rows = slice(row + 1) if row else slice(1)
                told = likeliest(alone[None, rows], 2)[0]
                assert set(told) == {int(expert) for each in alone[rows] for expert in each.topk(2)[1]}
                assert told[0] in {int(each.argmax()) for each in alone[rows]}


def test_each_layer_hears_before_it_runs(model: Decoder, heard: Heard) -> None:
    cache = model.new_cache(1, 8)
    with torch.inference_mode():
        ForesightClimb(foresight(model, 0.1), ForesightPlan(2)).run(model, Draft.given_only({0: [4, 9, 33]}), cache)
    for index in (i for i in range(1, model.config.num_layers) if model.config.is_moe(i)):
        kinds = [kind for kind, layer, _ in heard if layer == index]
        assert kinds == ["expected", "ran"]
        likely = next(experts for kind, layer, experts in heard if (kind, layer) == ("expected", index))
        assert 2 <= len(likely) <= 6
        assert len(set(likely)) == len(likely)


def test_refining_asks_again_from_the_layer_below(model: Decoder, heard: Heard) -> None:
    with torch.inference_mode():
        climb = ForesightClimb(foresight(model, 0.1, rate=3), ForesightPlan(2, (1,)))
        climb.run(model, Draft.given_only({0: [4]}), model.new_cache(1, 8))
    top = model.config.num_layers - 1
    assert [kind for kind, layer, _ in heard if layer == top] == ["expected", "expected", "ran"]


def test_whoever_is_asked_about_the_next_layer_is_asked_once(model: Decoder, heard: Heard) -> None:
    """A low rate speaks for the next layer itself, and knows more of it than the slow residual."""
    assert model.config.moe is not None
    seeing = foresight(model, 0.1, rate=1.25)
    with torch.inference_mode():
        climb = ForesightClimb(seeing, ForesightPlan(1, (1,)))
        climb.run(model, Draft.given_only({0: [4]}), model.new_cache(1, 8))
    told = [experts for kind, layer, experts in heard if (kind, layer) == ("expected", 2)]
    assert [len(experts) for experts in told] == [model.config.moe.top_k] * model.config.is_moe(2)


def test_prompt_chunks_are_not_guessed_for(model: Decoder, heard: Heard) -> None:
    with torch.inference_mode():
        climb = ForesightClimb(foresight(model), ForesightPlan())
        climb.run(model, Draft.given_only({0: [4, 9, 33]}), model.new_cache(1, 8), chunk=True)
    assert {kind for kind, *_ in heard} == {"ran"}


def test_what_is_expected_of_a_token_does_not_depend_on_later_ones(model: Decoder, heard: Heard) -> None:
    climb = ForesightClimb(foresight(model, 0.2), ForesightPlan(2))
    said = []
    for tokens in ([[4], [9]], [[4], [33]]):
        cache = model.new_cache(1, 8)
        for place, given in enumerate(tokens):
            heard.clear()
            with torch.inference_mode():
                climb.run(model, Draft.given_only({0: given}), cache)
            cache.commit([0], [[0]])
            if place == 0:
                said.append(list(heard))
    assert said[0] == said[1]


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


def test_the_loss_sees_what_decoding_sees(model: Decoder, heard: Heard) -> None:
    """Incremental equals dense: recall while decoding a text is the objective's."""
    assert model.config.moe is not None
    seeing, top_k = foresight(model, 0.05), model.config.moe.top_k
    text = batch(12, 1)
    with torch.inference_mode():
        ((_, seen),) = ForesightObjective(seeing, ForesightLoss()).losses(model, text)
        heard.clear()
        cache = model.new_cache(1, 16)
        for token in text.tokens[0, :-1].tolist():
            ForesightClimb(seeing, ForesightPlan()).run(model, Draft.given_only({0: [token]}), cache)
            cache.commit([0], [[0]])
    expected = [set(experts) for kind, _, experts in heard if kind == "expected"]
    ran = [set(experts) for kind, layer, experts in heard if kind == "ran" and layer > 0]
    mixtures = sum(model.config.is_moe(i) for i in range(model.config.num_layers))
    told = sum(len(a & b) for a, b in zip(_by_layer(expected, mixtures - 1), ran, strict=True)) / top_k
    assert told / (11 * mixtures) == pytest.approx(seen["recall"], abs=1e-6)


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
    with pytest.raises(ConfigError, match="between 0 and 1"):
        ForesightPlan(at_least=1.0)
    from dataclasses import replace

    with pytest.raises(UnsupportedError, match="is for mixtures of experts"):
        Foresight(ForesightConfig(), replace(model.config, moe=None))


def test_native_routers_say_what_torch_says_of_one_row(model: Decoder, body: NativeBody) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16).eval()
    pack_decoder(rounded, body)
    seen, layers = foresight(rounded, 0.3), tuple(filter(model.config.is_moe, range(model.config.num_layers)))
    native = Routers.of(rounded, dict.fromkeys(layers, 3), seen, {layers[0]: 2})
    assert native.body is body
    draw = torch.Generator().manual_seed(4)
    for _ in range(20):
        p, slow = torch.randn(2, 1, model.config.width, generator=draw).bfloat16().unbind()
        alone = native.likeliest(p, slow)
        assert alone == replace(native, body=None).likeliest(p, slow)
        logits = slow.float() @ native.weight[0]
        assert alone[-1] == logits[0].topk(2)[1].tolist(), "the last is asked about the slow residual alone"
    greedy = Routers.of(rounded, dict.fromkeys(layers, 99), seen, {})
    assert greedy.likeliest(p, slow) == replace(greedy, body=None).likeliest(p, slow)

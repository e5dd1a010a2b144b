"""Several gates: what holds for one residual holds at each of them; targets and rates; training teaches them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.core.entries import all_entries
from tests.methods.dynamic.gated import GATES, make_weights, text_batch
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GateConfig, GatedAccelerator, GatesConfig
from vivace.methods.dynamic.objective import GatesLoss, GatesObjective
from vivace.train.distillation import FrozenPass

FP32 = torch.float32
TOKENS = torch.tensor([5, 9, 2, 40, 41, 7, 7, 60])


@torch.no_grad()
def full_text(model: Decoder, gates: GatedAccelerator, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Slow residuals at every depth, and each gate's accelerated ones at its own, for a text at once."""
    step, residuals = Step.dense(1, len(tokens)), [torch.empty(0)]
    residuals[0] = model.embed(tokens, step)
    model.run(residuals[0], step, watch=lambda _, h: residuals.append(h))
    starts = [residuals[gates.config.interval(gate)[0]] for gate in range(3)]
    trails = [gates.accelerate(model, g, h, step, (gates.config.layers[g],)) for g, h in enumerate(starts)]
    return residuals, [gates.at_gate(g, trail[:, -1]) for g, trail in enumerate(trails)]


def test_untrained_gates_are_the_slow_stream(deep) -> None:
    """Without adapters, logits at a gate are those of the slow residual there."""
    model = deep(FP32)
    residuals, gates = full_text(model, make_weights(model).gates, TOKENS)
    for depth, p in zip(GATES.layers, gates, strict=True):
        torch.testing.assert_close(p, residuals[depth], atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["delta", "lite"])
def test_row_by_row_is_the_whole_text(deep, mode) -> None:
    """In float64: residuals here are near ten, and float32 rounds a row and a text differently."""
    model = deep(torch.float64)
    gates = make_weights(model, noise=0.3, mode=mode).gates
    _, whole = full_text(model, gates, TOKENS)
    cache = model.new_cache(1, 64)
    for at, token in enumerate(TOKENS):
        step = Step.of(Draft.committed_only({0: [int(token)]}), cache)
        h = model.embed(token[None], step)
        for gate, stop in enumerate(GATES.layers):
            h, trail = gates.forward(model, gate, h, step, torch.tensor([0]), (stop,))
            torch.testing.assert_close(gates.at_gate(gate, trail[0, -1]), whole[gate][at], atol=1e-10, rtol=1e-10)
        cache.commit([0], [range(1)])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=["fp32", "bf16"])
def test_companions_change_no_slow_row_and_no_entry(deep, dtype) -> None:
    """The slow residual is the same, to the bit, with accelerated rows beside it and without."""
    model = deep(dtype)
    gates = make_weights(model, noise=0.3).gates
    caches = [model.new_cache(1, 64) for _ in range(2)]
    for token in TOKENS.tolist():
        with_, without = (Step.of(Draft.committed_only({0: [token]}), cache) for cache in caches)
        h = bare = model.embed(torch.tensor([token]), without)
        for gate in range(3):
            start, stop = GATES.interval(gate)
            h, _ = gates.forward(model, gate, h, with_, torch.tensor([0]), (stop,))
            bare = model.run(bare, without, start, stop)
            assert torch.equal(h, bare)
        for cache in caches:
            cache.commit([0], [range(1)])
    for layer in range(GATES.layers[-1]):
        for ours, theirs in zip(*(all_entries(cache, layer) for cache in caches), strict=True):
            assert torch.equal(ours, theirs)


def test_later_tokens_change_nothing_before_them(deep) -> None:
    model = deep(FP32)
    gates = make_weights(model, noise=0.3).gates
    changed = TOKENS.clone()
    changed[5] = 88
    for one, other in zip(full_text(model, gates, TOKENS)[1], full_text(model, gates, changed)[1], strict=True):
        torch.testing.assert_close(one[:5], other[:5], atol=1e-6, rtol=1e-6)
        assert not torch.allclose(one[5:], other[5:])


def test_every_gate_has_its_own_interval_and_its_own_target() -> None:
    config = GatesConfig((GateConfig(2), GateConfig(5, rate=2.0), GateConfig(7, rate=9.0)))
    assert [config.interval(gate) for gate in range(3)] == [(0, 2), (2, 5), (5, 7)]
    assert [config.target(gate, 12) for gate in range(3)] == [12, 2 + 2 * 3, 12]


def test_a_gate_leaves_the_others_alone(deep) -> None:
    """Adapters of one interval are not read in another."""
    model = deep(FP32)
    gates = make_weights(model).gates
    before = full_text(model, gates, TOKENS)[1]
    with torch.no_grad():
        gates.up[list(gates._by_site[1]).index((3, "mlp"))].add_(1.0)
    after = full_text(model, gates, TOKENS)[1]
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: GateConfig(0), "layer must be at least 1"),
        (lambda: GateConfig(2, rate=0.5), "rate must be at least 1"),
        (lambda: GatesConfig(()), "at least one gate"),
        (lambda: GatesConfig((GateConfig(3), GateConfig(3))), "one above the other"),
        (lambda: GatesConfig((GateConfig(6),)).check_fits(6), "must lie below the top"),
        (lambda: GatesLoss(temperature=0), "temperature"),
        (lambda: GatesLoss(rows=0), "rows"),
    ],
)
def test_what_does_not_fit_is_refused(made: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        made()


def state_hash(model: Decoder) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def train(model: Decoder, gates: GatedAccelerator, steps: int) -> None:
    objective = GatesObjective(gates, GatesLoss(rows=90))
    optimiser = torch.optim.AdamW(objective.groups(), lr=4e-3)
    for step in range(steps):
        optimiser.zero_grad()
        for loss, _ in objective.losses(model, text_batch(step % 4)):
            loss.backward()
        optimiser.step()
        objective.updated()


@torch.no_grad()
def nearness(model: Decoder, gates: GatedAccelerator | None) -> list[tuple[float, float, float]]:
    """(agreement, negative divergence, cosine) with the top, gate by gate; None is the slow residual there."""
    text = text_batch(0)
    slow, rows = FrozenPass.of(model, text.tokens, range(model.config.num_layers)), text.predicting
    top = slow.final[rows]
    truth = torch.log_softmax(model.head(top), -1)
    found = []
    for gate, depth in enumerate(GATES.layers):
        p = slow.residuals[depth][rows]
        if gates is not None:
            start = slow.residuals[GATES.interval(gate)[0]]
            trail = gates.accelerate(model, gate, start, slow.step, (depth,))
            p = gates.at_gate(gate, trail[rows, -1])
        said = torch.log_softmax(model.head(p), -1)
        agreed = float((said.argmax(-1) == truth.argmax(-1)).float().mean())
        kl = float((truth.exp() * (truth - said)).sum(-1).mean())
        found.append((agreed, -kl, float(torch.cosine_similarity(p, top).mean())))
    return found


def test_training_brings_every_gate_nearer_than_the_slow_stream_and_leaves_the_base(deep) -> None:
    """More agreement, less divergence and a smaller angle than the slow residual at the same gate; the base stays."""
    model = deep(FP32)
    before = state_hash(model)
    gates = make_weights(model, rank=8, bottleneck=48).gates
    train(model, gates, 100)
    assert state_hash(model) == before
    for fast, slow in zip(nearness(model, gates), nearness(model, None), strict=True):
        assert all(better > worse for better, worse in zip(fast, slow, strict=True))


def test_a_lite_stream_learns_too(deep) -> None:
    model = deep(FP32)
    gates = make_weights(model, mode="lite", rank=8, bottleneck=48).gates
    untrained = nearness(model, gates)
    train(model, gates, 60)
    for fast, slow in zip(nearness(model, gates), untrained, strict=True):
        assert all(better > worse for better, worse in zip(fast, slow, strict=True))


def test_parts_give_the_gradient_of_the_whole(deep) -> None:
    model, gradients = deep(FP32), []
    for rows in (7, 4096):
        gates = make_weights(model, noise=0.05).gates
        for loss, _ in GatesObjective(gates, GatesLoss(rows=rows)).losses(model, text_batch(0)):
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in gates.parameters()]))
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)

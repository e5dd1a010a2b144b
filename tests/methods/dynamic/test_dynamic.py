"""Dynamic depth by the accelerated residual in the loop, greedy and batched."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.dynamic.gated import make_weights
from vivace.core.cpu.backend import pack_decoder
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.kernels.native import NativeBody
from vivace.methods.dynamic.drafter import DynamicDepth
from vivace.methods.dynamic.router import RouterConfig

COUNT = 16
BF16 = torch.bfloat16


def drafter(model, thresholds, missing="deferred", noise=0.05, **router) -> DynamicDepth:
    weights = make_weights(model, noise=noise, **router)
    weights.gates.requires_grad_(False)
    weights.router.requires_grad_(False)
    return DynamicDepth(weights, ExitPlan((ExitThresholds(0.98, thresholds),), missing))


def answers(model, how, slots=3):
    session = Session(model, num_slots=slots, capacity=64, chunk=8)
    return finish(session, [Request(p, COUNT, how, logprobs=True) for p in prompts(5, seed=2)], every=2)


@pytest.mark.parametrize("thresholds", [(1.1, 1.1, 1.1), (None, None, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_no_threshold_can_be_passed_is_plain_decoding(deep, dtype, thresholds) -> None:
    """Nobody leaves; companions run (or not) and change nothing."""
    texts = [plain_text(deep(dtype), prompt, COUNT) for prompt in prompts(5, seed=2)]
    for result, text in zip(answers(deep(dtype), drafter(deep(dtype), thresholds)), texts, strict=True):
        assert (result.tokens, result.logprobs) == (text.new, text.logprobs)
        assert result.stats.early_exit_share == 0
        companions = 5 if thresholds[0] is not None else 0
        assert result.stats.num_layer_passes == COUNT * (6 + companions)


@pytest.mark.parametrize(
    ("thresholds", "spans"),
    [
        ((None, None, None), [(0, 6)]),
        ((None, None, 1.1), [(0, 4), (4, 5), (5, 6)]),
        ((1.1, None, None), [(0, 2), (2, 6)]),
    ],
    ids=str,
)
def test_a_shut_gate_is_no_stop_and_has_no_companions(deep, monkeypatch, thresholds, spans) -> None:
    model, ran = deep(BF16), []
    how, run = drafter(model, thresholds, router=RouterConfig("linear", stride=6)), model.run

    def noting(h, step, start=0, stop=None, **more):
        ran.append((start, 6 if stop is None else stop))
        return run(h, step, start, stop, **more)

    monkeypatch.setattr(model, "run", noting)
    [result] = finish(Session(model, num_slots=1, capacity=64), [Request((5, 6, 7), 4, how)])
    assert ran[-len(spans) :] == spans
    companions = {0: 0, 1: 1 if thresholds[0] is None else 2}[sum(at is not None for at in thresholds)]
    assert result.stats.num_layer_passes == 4 * (6 + companions)


@pytest.mark.parametrize("missing", ["deferred", "propagate", "mask"])
def test_everything_leaves_at_the_first_gate_when_anything_may(deep, missing) -> None:
    """A threshold below every score; what is said is the gate's own guess."""
    how = drafter(deep(BF16), (-1.0, 0.5, 0.5), missing)
    for result in answers(deep(BF16), how):
        layers = result.stats.exit_layers
        if missing == "mask":
            assert layers == [2] * COUNT
        else:
            assert layers == ([2] * 8 + [6] + [2] * 7 if missing == "deferred" else [2] * COUNT)


def test_exits_grow_as_thresholds_fall(deep) -> None:
    shares = []
    for threshold in (0.9, 0.6, 0.5, 0.4, 0.1):
        found = answers(deep(BF16), drafter(deep(BF16), (threshold,) * 3))
        shares.append(sum(r.stats.num_early_exits for r in found))
    assert shares == sorted(shares)
    assert shares[0] < shares[2] < shares[-1]


def test_a_batch_says_what_each_says_alone(deep) -> None:
    """Rows that leave at different gates are compacted and change no neighbour, exits and text alike."""
    how = drafter(deep(BF16), (0.55, 0.5, 0.5))
    alone, together = answers(deep(BF16), how, slots=1), answers(deep(BF16), how, slots=5)
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.stats.exit_layers) == (other.tokens, other.stats.exit_layers)
    assert len({layer for r in alone for layer in r.stats.exit_layers}) >= 3


@pytest.mark.parametrize("missing", ["deferred", "propagate", "mask"])
def test_packed_weights_do_the_same(body: NativeBody, missing) -> None:
    model = build(BF16, num_layers=6, seed=3).requires_grad_(False)
    how = drafter(model, (0.55, 0.5, 0.5), missing)
    pack_decoder(model, body)
    plain = answers(model, NoDrafts())
    closed = answers(model, drafter(model, (1.1, None, 1.1), missing))
    assert [(r.tokens, r.logprobs) for r in plain] == [(r.tokens, r.logprobs) for r in closed]
    alone, together = answers(model, how, slots=1), answers(model, how, slots=5)
    assert [(r.tokens, r.stats.exit_layers) for r in alone] == [(r.tokens, r.stats.exit_layers) for r in together]
    assert sum(r.stats.num_early_exits for r in alone) > 5


def test_qualities_are_those_that_were_calibrated() -> None:
    plan = ExitPlan((ExitThresholds(0.95, (0.5,)), ExitThresholds(0.98, (0.7,))))
    assert plan.at(None).thresholds == (0.7,)
    assert plan.at(0.95).thresholds == (0.5,)
    with pytest.raises(ConfigError, match=r"quality is 0\.97; the thresholds of this adapter are for 0\.95, 0\.98"):
        plan.at(0.97)


def test_a_plan_for_other_gates_is_refused(deep) -> None:
    with pytest.raises(ConfigError, match="2 thresholds for 3 gates"):
        drafter(deep(BF16), (0.5, 0.5))

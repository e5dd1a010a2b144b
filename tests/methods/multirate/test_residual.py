"""The accelerated residual itself.

Untrained it is the slow one; it changes nothing for the slow one; it reads what that one stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.residual import Accelerator, dual_forward

FP32 = torch.float32
TOKENS = torch.tensor([5, 9, 2, 40, 41, 7, 7, 60])


def full_text(model: Decoder, accelerator: Accelerator, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Slow and accelerated residuals at the gate for a whole text at once, (T, E) each."""
    step = Step.dense(1, len(tokens))
    h = model.embed(tokens, step)
    return dual_forward(model, accelerator, h, step, torch.arange(len(tokens)), None)


@torch.inference_mode()
def test_untrained_delta_is_the_slow_residual_at_every_layer(deep, accelerator) -> None:
    model = deep(FP32)
    for gate in range(1, 6):
        slow, fast = full_text(model, accelerator(FP32, exit_layer=gate), TOKENS)
        assert (slow - fast).abs().max() <= 1e-6
        torch.testing.assert_close(model.head(slow), model.head(fast), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_untrained_lite_takes_attention_alone(deep, accelerator) -> None:
    model = deep(FP32)
    slow, fast = full_text(model, accelerator(FP32, mode="lite"), TOKENS)
    assert (slow - fast).abs().max() > 1e-2
    step = Step.dense(1, len(TOKENS))
    h = model.embed(TOKENS, step)
    model.run(h, step, 0, 3)
    for layer in model.layers[:3]:
        reading = replace(step, num_write=0)
        h = layer.output(h, layer.read(layer.project(h, reading), reading), reading)
    torch.testing.assert_close(fast, h, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_slow_rows_do_not_notice_their_companions(deep, accelerator, dtype: torch.dtype) -> None:
    """Residuals and cache to the bit, with a random accelerator on and off."""
    model = deep(dtype)
    plain, beside = model.new_cache(1, 64), model.new_cache(1, 64)
    draft = Draft.committed_only({0: TOKENS.tolist()})
    step = Step.of(draft, plain)
    alone = model.run(model.embed(TOKENS, step), step, 0, 3)
    step = Step.of(draft, beside)
    slow, _ = dual_forward(
        model, accelerator(dtype, noise=0.3), model.embed(TOKENS, step), step, torch.arange(len(TOKENS)), None
    )
    assert torch.equal(alone, slow)
    assert plain.nbytes == beside.nbytes
    for layer in range(3):
        for ours, theirs in zip(plain.span(layer, 0, 0, 8), beside.span(layer, 0, 0, 8), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["delta", "lite"])
@torch.inference_mode()
def test_token_by_token_equals_the_whole_text(deep, accelerator, mode: str) -> None:
    model, fast = deep(torch.float64), accelerator(torch.float64, noise=0.3, mode=mode)
    _, whole = full_text(model, fast, TOKENS)
    cache = model.new_cache(1, 64)
    rows = []
    for token in TOKENS.tolist():
        step = Step.of(Draft.committed_only({0: [token]}), cache)
        h = model.embed(torch.tensor([token]), step)
        rows.append(dual_forward(model, fast, h, step, torch.tensor([0]), None)[1])
        cache.commit([0], [[0]])
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-10, rtol=1e-10)


@torch.inference_mode()
def test_an_accelerated_row_sees_the_past_and_no_other_accelerated_row(deep, accelerator) -> None:
    model, fast = deep(FP32), accelerator(FP32, noise=0.3)
    _, before = full_text(model, fast, TOKENS)
    changed = TOKENS.clone()
    changed[5] = 11
    _, after = full_text(model, fast, changed)
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:], atol=1e-3)
    step = Step.dense(1, len(TOKENS))
    h = model.embed(TOKENS, step)
    cache = model.new_cache(1, 64)
    step = Step.of(Draft.committed_only({0: TOKENS.tolist()}), cache)
    _, few = dual_forward(model, fast, h, step, torch.tensor([2, 6]), None)
    torch.testing.assert_close(few, before[[2, 6]], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_feedback_moves_the_start_only(deep, accelerator) -> None:
    model, fast = deep(FP32), accelerator(FP32, noise=0.3, feedback=True)
    cache = model.new_cache(1, 64)
    step = Step.of(Draft.committed_only({0: [5]}), cache)
    h = model.embed(torch.tensor([5]), step)
    slow, without = dual_forward(model, fast, h, step, torch.tensor([0]), torch.zeros(1, 48))
    same, moved = dual_forward(model, fast, h, step, torch.tensor([0]), torch.ones(1, 48))
    assert torch.equal(slow, same)
    assert not torch.allclose(without, moved, atol=1e-3)


def test_config_refuses_what_cannot_be(deep: Callable[[torch.dtype], Decoder]) -> None:
    no_width = {"mode": "lite", "bottleneck": 0}
    for fields in ({"exit_layer": 0}, {"mode": "fast"}, {"rank": -1}, {"bottleneck": -1}, no_width):
        with pytest.raises(ConfigError):
            MultirateConfig(**fields)
    with pytest.raises(ConfigError, match="exit_layer 6 must lie below the top of a model of 6 layers"):
        Accelerator(MultirateConfig(exit_layer=6), deep(FP32).config)

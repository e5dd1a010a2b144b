"""A step with clustered matrices and one without start from the same model and both change what they train."""

from __future__ import annotations

import pytest
import torch

from benchmarks import palette_step
from benchmarks.kernels import _random_llama
from vivace.train.optim import Optimiser, OptimiserConfig

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("kind", palette_step.KINDS)
def test_a_step_trains_every_matrix(kind: str) -> None:
    stored, student = _random_llama(SHAPE).float(), _random_llama(SHAPE).float()
    objective = palette_step.objective_of(kind, student, 3)
    optimiser = Optimiser(objective.groups(), OptimiserConfig(adamw_rate=1e-3))
    before = [parameter.detach().clone() for parameter in optimiser.params]
    assert len(before) == 4
    palette_step.make_step(objective, optimiser, stored, palette_step.drawn_batch(96, 64))
    palette_step.make_step(objective, optimiser, stored, palette_step.drawn_batch(96, 64))
    assert not any(torch.equal(*pair) for pair in zip(before, optimiser.params, strict=True))


def test_both_kinds_are_measured() -> None:
    setting = {"tokens": 32, "bits": 3, "steps": 1}
    found = {kind: palette_step.measure(kind, SHAPE, setting) for kind in palette_step.KINDS}
    assert all(cost["seconds"] > 0 and cost["peak_bytes"] > 0 for cost in found.values())

"""The estimate grows with what it counts, and a run that cannot fit is refused with both numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train.tiny import tiny_decoder
from vivace.errors import CapacityError
from vivace.train.memory import MemoryEstimate, estimate_memory, require_memory


def estimate(tokens: int, *, recompute: bool = False) -> MemoryEstimate:
    model = tiny_decoder()
    weights = list(model.parameters())
    return estimate_memory(model.config, weights, weights[:1], 1000, tokens, recompute=recompute)


def test_it_counts_what_is_held() -> None:
    model = tiny_decoder()
    small, large = estimate(512), estimate(4096)
    assert small.weights == sum(p.nbytes for p in model.parameters())
    assert small.gradients == next(model.parameters()).nbytes
    assert small.optimiser == 1000
    assert large.activations > 4 * small.activations
    assert estimate(4096, recompute=True).activations < large.activations
    assert str(small).startswith("about ")


def test_activations_are_an_upper_bound_of_what_autograd_keeps() -> None:
    from vivace.core.step import Step

    model, kept = tiny_decoder(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    step = Step.dense(8, 32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        h = model.run(model.embed(torch.arange(256), step), step)
    weights = sum(p.nbytes for p in model.parameters())
    assert h.requires_grad
    assert sum(kept.values()) - weights < estimate(256).activations < 20 * sum(kept.values())


def test_a_run_that_cannot_fit_is_refused() -> None:
    require_memory(MemoryEstimate(1, 1, 1, 1), torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"are free; lower tokens_per_batch"):
        require_memory(MemoryEstimate(1, 1, 1, 1 << 60), torch.device("cpu"))


def test_recomputed_layers_keep_one_layer_beside_all_inputs() -> None:
    """Of a model with feed-forwards that are wider than all inputs of layers together this is most of it."""
    model = tiny_decoder()
    weights = list(model.parameters())
    few, many = (
        estimate_memory(replace(model.config, num_layers=n), weights, weights[:1], 0, 4096, recompute=True).activations
        for n in (1, 2)
    )
    plain = estimate_memory(replace(model.config, num_layers=1), weights, weights[:1], 0, 4096).activations
    assert many - few == 4096 * 4 * model.config.width
    assert few - plain == 4096 * 4 * model.config.width

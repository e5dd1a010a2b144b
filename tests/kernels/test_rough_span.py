"""Copies of some layers in few bits, for drafts: those layers read them, the others and the model do not."""

from __future__ import annotations

import pytest
import torch

from tests.decode.tiny_decoders import build
from vivace.core.config import MoeConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.step import Step
from vivace.kernels.native import NativeBody

KINDS = {
    "gated": {},
    "without a gate": {"gated": False, "norm": "layer", "positions": "learned"},
    "experts": {"moe": MoeConfig(4, 4, 20, True)},  # all of them: other weights would choose others
}


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["int8", "q4"])
def test_only_the_layers_named_are_rounded(body: NativeBody, weights, kind: str) -> None:
    model = build(torch.bfloat16, num_layers=6, seed=3, **KINDS[kind]).requires_grad_(False)
    pack_decoder(model, body)
    span = model.backend.span
    assert span is not None
    rough = span.quantized(2, 4, weights)
    cache = model.new_cache(1, 8)

    def after(which, start: int, stop: int) -> torch.Tensor:
        step = Step.at(cache, [0], [0])
        return which.run(model.embed(torch.tensor([5]), step), step, start, stop)

    for start, stop in ((0, 2), (4, 6)):
        assert torch.equal(after(rough, start, stop), after(span, start, stop))
    exact, rounded = after(span, 2, 4).float(), after(rough, 2, 4).float()
    away = (exact - rounded).norm() / exact.norm()
    assert 0 < away < 0.25

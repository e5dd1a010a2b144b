"""Attention that is differentiated is the fused one, in value and in gradient."""

from __future__ import annotations

import pytest
import torch

from vivace.kernels import reference as kernels


@pytest.fixture(autouse=True)
def inference() -> None:
    """Unlike the other kernels this one is called with gradients."""


@pytest.mark.parametrize("masked", [False, True])
def test_written_out_attention_is_the_fused_one(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 7, 4, 8), (3, 2, 7, 8), (3, 2, 7, 8))
    ours, fused = ([torch.empty(shape) for shape in shapes] for _ in range(2))
    for mine, theirs in zip(ours, fused, strict=True):
        mine.normal_(generator=generator)
        theirs.copy_(mine)
    mask = None
    if masked:
        mask = torch.zeros(7, 7).masked_fill_(
            torch.ones(7, 7).triu(1).bool() | torch.ones(7, 7).tril(-3).bool(), -torch.inf
        )
    outs = []
    for inputs, limit in ((ours, 512), (fused, 0)):
        for tensor in inputs:
            tensor.requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "SHORT", limit)
            out = kernels.attend_chunk(*inputs, mask, scale=0.3)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1])
    for mine, theirs in zip(ours, fused, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-3)

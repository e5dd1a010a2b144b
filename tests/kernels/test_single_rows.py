"""A single bfloat16 row has the bits it has beside others, also where PyTorch takes another path for it.

The two paths sum in another order; rounding to bfloat16 hides that for all but one output in ten thousand,
so these tests look at many.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from vivace.kernels import reference as kernels

SHAPES = [(48, 48), (48, 64), (64, 64), (65, 64), (8, 512), (1024, 1024), (512, 1025), (1024, 2048), (256, 5632)]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def sample(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    out_width, in_width = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * in_width**-0.5
    rows = torch.randn(min(2000, 60_000 // out_width), in_width, generator=generator)
    return weight.bfloat16(), rows.bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone_as_among_others(shape: tuple[int, int]) -> None:
    weight, rows = sample(shape)
    alone = torch.cat([kernels.linear(row[None], weight) for row in rows])
    for count in (2, 3, 16, 33):
        together = torch.cat([kernels.linear(part, weight) for part in rows.split(count)])
        assert torch.equal(together, alone), f"{count} rows"


def test_the_measure_is_sharp() -> None:
    """Without the rule the difference is found here, at least where the paths are known to differ."""
    weight, rows = sample((1024, 2048))
    alone = torch.cat([F.linear(row[None], weight) for row in rows])
    if torch.backends.mkldnn.is_available() and torch.cpu.get_capabilities().get("avx512_bf16"):
        assert not torch.equal(F.linear(rows, weight), alone)

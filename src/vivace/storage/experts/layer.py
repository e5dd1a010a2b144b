"""The experts of one layer over an expert cache, as a mixture sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vivace.core.moe import Expert
from vivace.core.step import Step
from vivace.storage.experts.cache import ExpertCache


class LayerExperts:
    """Implements ``Experts`` for one layer."""

    def __init__(self, cache: ExpertCache, layer: int) -> None:
        self.cache = cache
        self.index = layer

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each chosen expert once, as it becomes ready."""
        for number, expert in self.cache.fetch(self.index, chosen, is_prompt=is_prompt):
            yield number, _RefetchedExpert(self, number, expert) if torch.is_grad_enabled() else expert

    def prefetch(self, likely: Sequence[int]) -> None:
        """Read these experts before the layer runs."""
        self.cache.prefetch(self.index, likely)

    def predict_reuse(self, passes: Sequence[float]) -> None:
        """Record in how many passes each expert is predicted to be chosen again."""
        self.cache.predict_reuse(self.index, passes)


@dataclass(frozen=True)
class _RefetchedExpert:
    """A frozen expert that gradients can pass: it is fetched once more for the backward pass."""

    experts: LayerExperts
    number: int
    expert: Expert

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        assert add is None
        y: Tensor = _RunExpert.apply(x, self, step)  # type: ignore[no-untyped-call]
        return y


class _RunExpert(torch.autograd.Function):
    """Runs an expert without keeping its graph, and runs it again, with one, when gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, refetched: _RefetchedExpert, step: Step) -> Tensor:
        ctx.save_for_backward(x)
        ctx.refetched, ctx.step = refetched, step
        ctx.is_cast, ctx.dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return refetched.expert(x, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        cache, layer = ctx.refetched.experts.cache, ctx.refetched.experts.index
        for _, expert in cache.fetch_again(layer, [ctx.refetched.number]):
            with torch.enable_grad(), torch.autocast("cpu", ctx.dtype, enabled=ctx.is_cast):
                y = expert(x, ctx.step)
            y.backward(grad)
        assert x.grad is not None
        return x.grad, None, None

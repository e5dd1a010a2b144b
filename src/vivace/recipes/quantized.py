"""Recipe for drafts by the model itself with quantized weights (``methods/quantized``): which text calibrates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vivace.core.layers import FeedForward, Linear
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, UnsupportedError
from vivace.kernels.reference import any_order
from vivace.methods.quantized.calibration import quantized_for
from vivace.methods.quantized.drafter import QuantizedConfig
from vivace.methods.quantized.stored import tensors_of
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter
from vivace.train.config import LoopConfig
from vivace.train.data import TokenBatch, sample_of


@dataclass(frozen=True, kw_only=True)
class QuantizedRecipe(FrozenRecipe):
    """How to quantize the layers that draft, on the model's own text."""

    kind: Literal["quantized"] = "quantized"
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=1, warmup_steps=0))
    """Unused: no weights are trained."""
    plan: DraftPlan = field(default_factory=lambda: DraftPlan((1,) * 6, 0.3, "q4"))
    """Shape of the draft, saved with the weights."""
    calibration_tokens: int = 16384
    """Number of tokens of text that the matrices are quantized for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration_tokens < 1:
            raise ConfigError(f"calibration_tokens must be at least 1, found {self.calibration_tokens}")
        if self.plan.weights != "q4":
            raise ConfigError(f"what is quantized here are weights of four bits: plan.weights is {self.plan.weights!r}")
        if not self.plan.is_chain:
            raise ConfigError(
                f"drafts in four bits are chains: plan.widths must be all 1, found {list(self.plan.widths)}"
            )

    def why_not(self, model: Decoder) -> str | None:
        """Return why four-bit drafts cannot be made for a model; None if they can."""
        if model.dtype == torch.bfloat16:
            return None
        return f"drafts in four bits are for bfloat16 weights, and these are {str(model.dtype).removeprefix('torch.')}"

    def begin(self, context: TrainContext) -> QuantizedTraining:
        """Return what quantizes the layers."""
        return QuantizedTraining(self, context)


class QuantizedTraining(Trainable):
    """Quantizes the layers of a model, from the first to the last."""

    objective = None

    def __init__(self, recipe: QuantizedRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe

    def finish(self) -> TrainedAdapter:
        """Return codes and scales of all matrices outside of experts."""
        model, note = self.context.engine.model, self.context.report.note
        batches = sample_of(self.context.batches(self.context.train), self.recipe.calibration_tokens)
        count = sum(batch.num_elements for batch in batches)
        found = dict[str, Tensor]()
        for index, tensors in enumerate(quantized_layers(model, batches), 1):
            found |= tensors
            if index % 8 == 0 or index == model.config.num_layers:
                note(f"quantized {index} of {model.config.num_layers} layers on {count:,} tokens")
        return TrainedAdapter(self.recipe.plan, QuantizedConfig(), found)


@torch.no_grad()
def quantized_layers(model: Decoder, batches: list[TokenBatch]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each layer, first to last; only the moments of one layer are in memory at once.

    Raises:
        UnsupportedError: the weights are not in memory as they were trained.
    """
    steps = [Step.dense(*batch.tokens.shape, device=model.device) for batch in batches]
    rows = [model.embed(batch.tokens.reshape(-1), step) for batch, step in zip(batches, steps, strict=True)]
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        parts = _parts(layer)
        moments = {id(module): torch.zeros(module.weight.shape[1], module.weight.shape[1]) for module, _ in parts}
        hooks = [module.register_forward_pre_hook(_adding_to(moments)) for module, _ in parts]
        try:
            with any_order():
                rows = [model.run(h, step, index, index + 1) for h, step in zip(rows, steps, strict=True)]
        finally:
            for hook in hooks:
                hook.remove()
        tensors = dict[str, Tensor]()
        for module, names in parts:
            codes, scales = quantized_for(module.weight.cpu(), moments[id(module)])
            halves = zip(names, codes.chunk(len(names)), scales.chunk(len(names)), strict=True)
            for name, some, sizes in halves:
                tensors |= tensors_of((index, name), some, sizes.contiguous())
        yield tensors


def _parts(layer: Layer) -> list[tuple[Linear, tuple[str, ...]]]:
    """Return the matrices of a layer with the names of what lies in them, one above the other."""
    feed = layer.feed_forward
    found: list[tuple[nn.Module, tuple[str, ...]]] = [(layer.qkv, ("qkv",)), (layer.o, ("o",))]
    if isinstance(feed, FeedForward):
        found += [(feed.up, ("gate", "up") if feed.gated else ("up",)), (feed.down, ("down",))]
    if not all(type(module) is Linear for module, _ in found):
        raise UnsupportedError(
            "weights that are read from a disk cannot be quantized for drafts; load them into memory"
        )
    return [(module, names) for module, names in found if isinstance(module, Linear)]


def _adding_to(moments: dict[int, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook that adds ``x x^T`` of a module's inputs to its moments."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float().reshape(-1, inputs[0].shape[-1])
        moments[id(module)] += (x.mT @ x).cpu()

    return add

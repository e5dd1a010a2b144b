"""Parts of a layer in one native call each: for callers that work between them, and where ranks add products.

The bits are those of whole layers in one call, and of the modules one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vivace.core.cpu.plan import why_no_span
from vivace.core.cpu.span import MixtureSpan, NativeSpan
from vivace.core.step import Step
from vivace.core.summed import SummedNorm, SummedProjection
from vivace.kernels.library import LayerPart
from vivace.kernels.native import NativeBody

if TYPE_CHECKING:
    from vivace.core.model import Decoder


class NativeSplitLayers:
    """Implements ``SplitLayers`` with the layers of a span."""

    def __init__(self, span: NativeSpan) -> None:
        """Run parts of the layers of a span."""
        self._span = span

    def covers(self, step: Step) -> bool:
        """Return whether a call can run so: as a span, and without deltas."""
        return not step.low_rank and not isinstance(self._span, MixtureSpan) and self._span.covers(step)

    def project(self, h: Tensor, step: Step, index: int) -> Tensor:
        """Store keys and values, and return queries, keys and values (T, H D + 2 K D)."""
        plan = self._span.plan
        heads = h.new_empty(len(h), (plan.heads + 2 * plan.kv_heads) * plan.head_width)
        self._span.part(h, step, index, LayerPart.PROJECTED, heads)
        return heads

    def finish(self, h: Tensor, projected: Tensor, step: Step, index: int) -> Tensor:
        """Attend, and compute the feed-forward."""
        return self._span.part(h, step, index, LayerPart.BEHIND, projected)


class SummedSpan(NativeSpan):
    """A span of a rank's share of the layers: a half of a layer in one native call, behind which ranks add products."""

    @staticmethod
    def of(decoder: Decoder, body: NativeBody) -> SummedSpan | None:
        """Make the span of a packed share, or return None where its layers run one by one: for the reasons of other
        spans, and where a norm is over the heads of all ranks.
        """
        norms_all = any(isinstance(each, SummedNorm) for each in decoder.modules())
        return None if norms_all or why_no_span(decoder.config) is not None else SummedSpan(decoder, body)

    def covers(self, step: Step) -> bool:
        """Return whether a call can run as a span: all its rows pass the whole layer, without deltas."""
        return not step.low_rank and step.num_feed == step.num_rows and super().covers(step)

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1, as all ranks do at once."""
        for layer in self._layers[start:stop]:
            for part, projection, norm in (
                (LayerPart.ATTENDED, layer.o, layer.attention_post_norm),
                (LayerPart.FED, layer.feed_forward.down, layer.ffn_post_norm),
            ):
                assert isinstance(projection, SummedProjection)
                h = layer.added(h, projection.summed(self.part(h, step, layer.index, part)), norm)
        return h


def is_share(decoder: Decoder) -> bool:
    """Return whether a decoder is a rank's share of a model."""
    return any(isinstance(each, SummedProjection) for each in decoder.modules())

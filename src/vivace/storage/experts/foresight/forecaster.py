"""The forecast in use: prefetches the experts of a pass before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Draft
from vivace.storage.experts.foresight.forecast import Forecast, Product


class Forecaster:
    """Prefetches the experts of a pass before it begins, by a forecast from the end of the pass before."""

    def __init__(self, forecast: Forecast, at_least: float) -> None:
        """Set what is predicted.

        Args:
            forecast: trained on the model.
            at_least: probability from which an expert is prefetched.
        """
        self._forecast = forecast
        self._least = math.log(at_least / (1 - at_least))
        self._mixtures: tuple[MixtureOfExperts, ...] = ()
        self._products: tuple[Product, Product] | None = None

    def predict(self, model: Decoder, draft: Draft, entering: Tensor, ends: Mapping[int, Tensor]) -> None:
        """Predict what the first row of each slot will choose in the pass that is about to begin.

        Args:
            model: the decoder.
            draft: the rows of the pass.
            entering: (T, E), their embeddings.
            ends: by slot, the residual (E) at the end of the pass before, as far as it is known.
        """
        nodes = enumerate(zip(draft.lists.slot, draft.lists.node, strict=True))
        rows = {row: ends[slot] for row, (slot, node) in nodes if node == 0 and slot in ends}
        if not rows:
            return
        if self._products is None:
            down, up = (weight.detach().to(model.dtype) for weight in (self._forecast.down, self._forecast.up))
            self._products = model.backend.projection(down), model.backend.projection(up)
            self._mixtures = tuple(_mixtures(model))
        last = torch.stack(list(rows.values()))
        chosen, passes = self._forecast.by(last, entering[list(rows)], *self._products)
        likely = _above(chosen.amax(0), self._least)
        again = passes.amin(0).float().exp2().tolist()
        for mixture, passes_of in zip(self._mixtures, again, strict=True):
            mixture.experts.predict_reuse(passes_of)
        for mixture, experts in zip(self._mixtures, likely, strict=True):
            if experts:
                mixture.experts.prefetch(experts)


def _above(logits: Tensor, least: float) -> list[list[int]]:
    """Return for each mixture the experts whose logits (mixtures, X) are above ``least``, the likeliest first."""
    order = logits.argsort(dim=-1, descending=True).tolist()
    return [experts[:count] for experts, count in zip(order, (logits > least).sum(-1).tolist(), strict=True)]


def _mixtures(model: Decoder) -> Iterator[MixtureOfExperts]:
    """Yield all mixtures of a model, in order."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.feed_forward, MixtureOfExperts):
            yield layer.feed_forward

"""The objective that trains foresight on a frozen mixture of experts.

A router reads the residual u_m *after* the attention of its layer, so that, and not the layer's input, is what the
accelerated residual p learns to be. With g_m and g_lm as in ``weights.py``:

    L = mean over m, t of  a_rt KL(softmax Router_m(LN2_m(u_m)) || softmax g_m) + a_al (1 - cos(p^n, u_m))
        + a_rt the same KL of each g_lm + the loss of the forecast (``forecast.py``)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.storage.experts.foresight.config import ForesightLoss
from vivace.storage.experts.foresight.forecast import Forecast, forecast_loss
from vivace.storage.experts.foresight.weights import Foresight, of_mean_square_one
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import FrozenPass, divergence
from vivace.train.objective import LossParts


class ForesightObjective(DecoderObjective):
    """Trains the weights of foresight and leaves the decoder frozen."""

    def __init__(self, foresight: Foresight, loss: ForesightLoss) -> None:
        """Set what is trained.

        Args:
            foresight: the weights.
            loss: weights of the terms.
        """
        assert foresight.model.moe is not None
        self.foresight = foresight
        self.loss = loss
        self._top_k = foresight.model.moe.top_k

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return one group of all weights, without decay."""
        return [{"params": list(self.foresight.parameters()), "name": "foresight", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield one loss over all mixtures and answer positions.

        Metrics are recalls of the routers' top k: ``recall`` by the accelerated residual, ``forecast`` by the forecast,
        and ``lead_l`` by routers that are asked l layers early.
        """
        rows, count = batch.predicting, model.config.num_layers
        mixtures = list(filter(model.config.is_moe, range(count)))
        frozen = FrozenPass.of(model, batch.tokens, range(count), attended=mixtures, rows=rows)
        routed = {index: model.layers[index].route(u) for index, u in frozen.attended.items()}  # type: ignore[operator]
        loss, metrics = frozen.embedded.new_zeros(()), {}
        if self.foresight.config.rate is not None:
            loss, metrics["recall"] = self._ahead(model, frozen, routed, rows)
        if self.foresight.forecast is not None:
            forecast, metrics["forecast"] = self._forecast(self.foresight.forecast, frozen, routed, batch)
            loss = loss + self.loss.forecast * forecast
        for lookahead in self.foresight.config.leads:
            kl, metrics[f"lead_{lookahead}"] = self._early(lookahead, model, frozen, routed, rows)
            loss = loss + self.loss.routing * kl
        yield loss, metrics

    def _early(
        self, lookahead: int, model: Decoder, frozen: FrozenPass, routed: Mapping[int, Tensor], rows: Tensor
    ) -> tuple[Tensor, float]:
        """Loss and recall of routers that are asked early about the slow residual, though never about the embedding."""
        layers = [index for index in routed if index > lookahead]
        found = []
        for index in layers:
            predicted = self._predict(model, index, lookahead, frozen.residuals[index - lookahead][rows])
            found.append(self._compare(predicted, routed[index]))
        if not found:
            return frozen.embedded.new_zeros(()), 0.0
        return torch.stack([kl for kl, _ in found]).mean(), sum(right for _, right in found) / len(found)

    def _predict(self, model: Decoder, index: int, lookahead: int | None, residual: Tensor) -> Tensor:
        """Return the logits (n, X) of an early router, in float32 whatever the rest of the pass is in."""
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        with torch.autocast(residual.device.type, enabled=False):
            return F.linear(of_mean_square_one(residual, model.config), self.foresight.router(layer, lookahead))

    def _ahead(
        self, model: Decoder, frozen: FrozenPass, routed: Mapping[int, Tensor], rows: Tensor
    ) -> tuple[Tensor, float]:
        """Loss and recall of the accelerated residual p."""
        loss, recall, truth = frozen.embedded.new_zeros(()), 0.0, frozen.attended
        for depth, p in self._accelerated(model, frozen.embedded, frozen.step):
            for index in self.foresight.targets(depth):
                seen = self.foresight.at(index, p[rows], frozen.residuals[depth][rows])
                predicted = self._predict(model, index, None, seen)
                kl, right = self._compare(predicted, routed[index])
                away = (1 - F.cosine_similarity(p[rows].float(), truth[index].float(), dim=-1)).mean()
                loss = loss + self.loss.routing * kl + self.loss.alignment * away
                recall += right / len(truth)
        return loss / len(truth), recall

    def _forecast(
        self, forecast: Forecast, frozen: FrozenPass, routed: Mapping[int, Tensor], batch: TokenBatch
    ) -> tuple[Tensor, float]:
        """Loss and recall of the forecast, from the last token of a prompt on."""
        rows, top_k = batch.predicting, self._top_k
        follows = rows % batch.tokens.shape[1] > 0
        places, chosen = rows[follows], []
        for each in routed.values():
            logits = each[follows]
            chosen.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(top_k, -1)[1], value=True))
        last, first = frozen.final[places - 1], frozen.embedded[places]
        return forecast_loss(forecast, last, first, torch.stack(chosen, 1), top_k)

    def _accelerated(self, model: Decoder, p: Tensor, step: Step) -> Iterator[tuple[int, Tensor]]:
        """Yield p (B * T, E) after 0, 1, ... layers, each with that number."""
        deltas = self.foresight.deltas(torch.zeros_like(step.slot))
        reading = replace(step, num_write=0, num_feed=0, deltas=(deltas,))
        yield 0, p
        for index in range(self.foresight.config.depth(model.config.num_layers)):
            p = model.run(p, reading, index, index + 1)
            yield index + 1, p

    def _compare(self, predicted: Tensor, routed: Tensor) -> tuple[Tensor, float]:
        """Return the mean KL of predicted logits (n, X) and those of the router, and the recall of its top k."""
        true, top_k = routed.float(), self._top_k
        kl = divergence(predicted, true) / len(predicted)
        with torch.no_grad():
            found, sought = predicted.topk(top_k, -1)[1], true.topk(top_k, -1)[1]
            right = (sought[:, :, None] == found[:, None, :]).any(-1).float().mean()
        return kl, float(right)

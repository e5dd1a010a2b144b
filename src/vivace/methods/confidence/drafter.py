"""Early exit by confidence: CALM and LITE.

CALM (Schuster et al. 2022, arXiv:2207.07061) lets a token exit at a layer where a measure exceeds a threshold:

* ``softmax``: p_1 - p_2, the gap between the two likeliest tokens under the shared head;
* ``cosine``: cos(h^i, h^{i-1}), how little the last layer changed the residual;
* ``learned``: sigmoid(w.h + b), trained to predict whether the exit's token is the whole model's, all else frozen.

LITE (Varshney et al. 2023, arXiv:2310.18581) uses ``probability``, p_1, on a model fine-tuned to predict tokens at its
exit layers (``train/supervised.py``); CALM's paper trains its model so as well. Keys and values above an exit are
computed from the residual at the exit (``propagate``), as in CALM.

Where we differ: thresholds are calibrated, as for every method here, exit by exit to a stated agreement with the whole
model on held-back text. CALM's test of whole sequences, and its threshold that falls with the length, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Traversal
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.depth import Depth, EarlyExit, ExitPlan, ExitThresholds, Missing
from vivace.decode.plain import NoDrafts
from vivace.errors import ConfigError
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import FrozenPass
from vivace.train.objective import LossParts

Measure = Literal["softmax", "cosine", "learned", "probability"]
_FEWEST = 20
"""Smallest number of held-back tokens that must exit for their agreement to be meaningful."""


@dataclass(frozen=True)
class ConfidenceConfig:
    """Where a token may exit, and which measure of confidence decides."""

    RENAMED: ClassVar[Mapping[str, str]] = {"gates": "exit_layers"}
    exit_layers: tuple[int, ...] = (6, 12, 18)
    """Exit layers in ascending order: number of layers below each."""
    measure: Measure = "softmax"

    def __post_init__(self) -> None:
        if not self.exit_layers or self.exit_layers[0] < 1 or list(self.exit_layers) != sorted(set(self.exit_layers)):
            raise ConfigError(f"exit_layers must rise from 1, found {list(self.exit_layers)}")
        if self.measure not in ("softmax", "cosine", "learned", "probability"):
            raise ConfigError(f"measure must be softmax, cosine, learned or probability, found {self.measure!r}")


@dataclass(frozen=True)
class ConfidencePlan(ExitPlan):
    """How to decode, saved next to the weights; entries above an exit are those of CALM unless it says otherwise."""

    missing: Missing = "propagate"


class Confidence(Trained):
    """Computes how confident a residual is; it has weights only where the measure is learned."""

    def __init__(self, config: ConfidenceConfig, model: ModelConfig) -> None:
        """Make an untrained one.

        Raises:
            ConfigError: an exit layer is not inside the model.
        """
        super().__init__()
        if config.exit_layers[-1] >= model.num_layers:
            raise ConfigError(
                f"exit_layers {list(config.exit_layers)} must lie below the top of a model of {model.num_layers}"
            )
        self.config = config
        self.classifier = nn.Linear(model.width, 1) if config.measure == "learned" else None

    def score(self, model: Decoder, h: Tensor, before: Tensor | None, *, row_count: int = 1) -> Tensor:
        """Return the confidence (n,) float32 of residuals (n, E).

        Args:
            model: the decoder.
            h: (n, E) residuals at an exit layer.
            before: (n, E) residuals one layer below, for ``cosine``.
            row_count: the head's call is padded to a multiple of this many rows, like the step.
        """
        match self.config.measure:
            case "cosine":
                assert before is not None
                return F.cosine_similarity(h.float(), before.float(), dim=-1)
            case "learned":
                return torch.sigmoid(self.logit(model, h))
        best = torch.softmax(model.head(h, row_count=row_count), -1).topk(2).values
        return best[:, 0] - best[:, 1] if self.config.measure == "softmax" else best[:, 0]

    def logit(self, model: Decoder, h: Tensor) -> Tensor:
        """Return the learned measure before the sigmoid, (n,)."""
        assert self.classifier is not None
        logit: Tensor = F.linear(model.norm(h).float(), self.classifier.weight.float(), self.classifier.bias.float())
        return logit[:, 0]


class ConfidentExit:
    """Implements ``ExitPolicy``: a row exits where its confidence exceeds the threshold."""

    def __init__(self, confidence: Confidence, thresholds: Sequence[float | None]) -> None:
        """Decide by calibrated thresholds.

        Raises:
            ConfigError: there are thresholds for another number of exit layers.
        """
        if len(thresholds) != len(confidence.config.exit_layers):
            raise ConfigError(f"{len(thresholds)} thresholds for {len(confidence.config.exit_layers)} exit layers")
        self.exit_layers = confidence.config.exit_layers
        self.confidence = confidence
        self.thresholds = tuple(thresholds)

    def forward(self, model: Decoder, index: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Run rows to an exit layer; where its threshold is None no confidence is computed."""
        start, stop = self.exit_layers[index - 1] if index else 0, self.exit_layers[index]
        threshold = self.thresholds[index]
        if threshold is None or len(asking) == 0:
            h = model.run(h, step, start, stop)
            return EarlyExit(h, torch.zeros(len(asking), dtype=torch.bool, device=h.device), h[asking])
        before = None
        if self.confidence.config.measure == "cosine":
            h = model.run(h, step, start, stop - 1)
            before, start = h[asking], stop - 1
        h = model.run(h, step, start, stop)
        exit_hidden = h[asking]
        score = self.confidence.score(model, exit_hidden, before, row_count=step.row_count)
        return EarlyExit(h, score > threshold, exit_hidden)


class ConfidentDepth(NoDrafts):
    """Implements ``Drafter``: drafts nothing, and runs each token until it is confident."""

    def __init__(self, name: str, weights: Confidence, plan: ConfidencePlan, quality: float | None = None) -> None:
        """Decode with the thresholds of a stated agreement.

        Raises:
            ConfigError: there are none for it.
        """
        super().__init__()
        self.name = name
        chosen = plan.at(quality)
        self.quality = chosen.quality
        policy = ConfidentExit(weights, chosen.thresholds)
        self.traversal: Traversal = Depth(policy, missing=plan.missing, max_pending=plan.max_pending)


@dataclass(frozen=True)
class ConfidenceScores:
    """The confidence of every exit on some text, and whether its token is the whole model's."""

    scores: Tensor
    """(n, exit layers) float32."""
    agrees: Tensor
    """(n, exit layers) bool."""


@torch.no_grad()
def confidence_scores(model: Decoder, confidence: Confidence, batches: Sequence[TokenBatch]) -> ConfidenceScores:
    """Return confidence and agreement at answer positions, computed after all layers below each exit."""
    scores, agrees = [], []
    exit_layers = confidence.config.exit_layers
    for batch in batches:
        rows = batch.predicting
        frozen = FrozenPass.of(model, batch.tokens, {*exit_layers, *(layer - 1 for layer in exit_layers)})
        truth = model.greedy(frozen.final[rows])
        at = {depth: h[rows] for depth, h in frozen.residuals.items()}
        scores.append(torch.stack([confidence.score(model, at[layer], at[layer - 1]) for layer in exit_layers], 1))
        agrees.append(torch.stack([model.greedy(at[layer]) == truth for layer in exit_layers], 1))
    return ConfidenceScores(torch.cat(scores), torch.cat(agrees))


def calibrated(measured: ConfidenceScores, quality: float) -> ExitThresholds:
    """Return, exit by exit, the lowest threshold above which a share ``quality`` of the exiting tokens agree."""
    left = torch.ones(len(measured.scores), dtype=torch.bool, device=measured.scores.device)
    thresholds: list[float | None] = []
    for scores, agrees in zip(measured.scores.T, measured.agrees.T, strict=True):
        ranked, order = scores[left].sort(descending=True)
        right = agrees[left][order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
        last_of_equals = torch.ones_like(order, dtype=torch.bool)  # equal scores exit together or not at all
        last_of_equals[:-1] = ranked[:-1] > ranked[1:]
        enough = ((right >= quality) & last_of_equals).nonzero()[:, 0]
        last = int(enough[-1]) if len(enough) else -1
        if last + 1 < _FEWEST:
            thresholds.append(None)
            continue
        below = float(ranked[last + 1]) if last + 1 < len(ranked) else float(ranked[last]) - 1.0
        thresholds.append(below)
        left &= scores <= below
    return ExitThresholds(quality, tuple(thresholds))


class ConfidenceObjective(DecoderObjective):
    """Trains the learned measure while everything else is frozen."""

    def __init__(self, confidence: Confidence) -> None:
        self.confidence = confidence

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the weights of the classifier."""
        return [{"params": list(self.confidence.parameters()), "name": "classifier", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the binary cross-entropy of each exit layer, divided by their number."""
        exit_layers, rows = self.confidence.config.exit_layers, batch.predicting
        frozen = FrozenPass.of(model, batch.tokens, exit_layers)
        with torch.no_grad():
            truth = model.greedy(frozen.final[rows])
        for layer in exit_layers:
            h = frozen.residuals[layer][rows]
            with torch.no_grad():
                label = (model.greedy(h) == truth).float()
            loss = F.binary_cross_entropy_with_logits(self.confidence.logit(model, h), label)
            yield loss / len(exit_layers), {f"exit {layer}": float(label.mean())}

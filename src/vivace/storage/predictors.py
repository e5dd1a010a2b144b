"""Which neurons of a ReLU feed-forward will be active: a low-rank guess from its input.

``active = up(down(x)) + bias > threshold`` with ``down`` (r, E) and ``up`` (F, r), trained on what really is active
(Alizadeh et al. 2023, arXiv:2312.11514, section 3.1; after Liu et al. 2023, Deja Vu, arXiv:2310.17157). Losses of
active and inactive neurons are balanced, and the threshold of each layer is set to the recall asked for on texts that
were not trained on. Training starts (ours) from the r directions in which what the layer computes before its ReLU
varies most; it keeps them where it finds nothing better. Predictors are judged and kept in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.files import read_tensors, staged, write_tensors
from vivace.core.layers import FeedForward, Linear
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError, MismatchError, NotFoundError
from vivace.kernels.native import Matrix, NativeBody
from vivace.storage.store import Store

FILE = "predictors.safetensors"


@dataclass(frozen=True, eq=False)
class Predictor:
    """The guess of one layer."""

    down: Tensor
    """(r, E)."""
    up: Tensor
    """(F, r)."""
    bias: Tensor
    """(F,), the threshold taken off; float32."""

    def active(self, x: Tensor, body: NativeBody | None = None) -> Tensor:
        """Neurons that any row of ``x`` (T, E) is expected to need, (n,) ascending; ``body`` multiplies in bfloat16."""
        return (self.scores(x, body) > 0).any(0).nonzero()[:, 0]

    def scores(self, x: Tensor, body: NativeBody | None = None) -> Tensor:
        """(T, E) -> (T, F); positive is active."""
        if body is not None and x.dtype == self.down.dtype == torch.bfloat16:
            down, up = (Matrix(part, None, part.shape[1], part.shape[0]) for part in (self.down, self.up))
            return body.linear(up, body.linear(down, x)).float() + self.bias
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up).float() + self.bias

    def to(self, dtype: torch.dtype) -> Predictor:
        """With its matrices in another dtype."""
        return replace(self, down=self.down.to(dtype), up=self.up.to(dtype))

    def in_order(self, order: Tensor) -> Predictor:
        """For neurons of which number ``order[i]`` lies at place i, (F,)."""
        return replace(self, up=self.up[order], bias=self.bias[order])


@dataclass(frozen=True)
class PredictorConfig:
    """How predictors are trained."""

    rank: int = 64
    recall: float = 0.99
    """Share of the active neurons that shall be found, on texts held back."""
    epochs: int = 4
    """Over the texts; 0 keeps the directions that training starts from."""
    learning_rate: float = 1e-3
    batch_tokens: int = 256
    balance: float = 0.5
    """Exponent on (inactive / active), the weight of an active neuron in the loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise ConfigError(f"recall is a share in (0, 1], found {self.recall}")
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")


@dataclass(frozen=True)
class PredictorReport:
    """How good a layer's predictor is on texts held back."""

    layer: int
    recall: float
    precision: float
    active_share: float
    """Of the neurons of a token, in truth."""
    predicted_share: float


def train_predictors(
    model: Decoder, texts: Sequence[Sequence[int]], config: PredictorConfig
) -> tuple[list[Predictor], list[PredictorReport]]:
    """Predictors for a resident model, layer after layer.

    Args:
        model: with ReLU feed-forwards and all weights in memory.
        texts: token ids; every tenth is held back to set thresholds by.
        config: how.

    Raises:
        ConfigError: fewer than ten texts, or a model without ReLU.
    """
    c = model.config
    if c.activation != "relu" or c.moe is not None:
        raise ConfigError(f"predictors are for feed-forwards with relu, this model has {c.activation}")
    learned, held = split_held(texts)
    predictors, reports = [], []
    pairs = zip(inputs_of(model, learned), inputs_of(model, held), strict=True)
    for layer, (x, x_held) in enumerate(pairs):
        feed = model.layers[layer].feed_forward
        assert isinstance(feed, FeedForward)
        gates, truth = gates_of(feed, x), gates_of(feed, x_held) > 0
        tried = [_start(feed, gates, config)]
        if config.epochs:
            tried.append(_train(tried[0], x, gates > 0, config))
        found = [_calibrate(layer, predictor.to(x.dtype), x_held, truth, config.recall) for predictor in tried]
        predictor, report = min(found, key=lambda one: one[1].predicted_share)
        predictors.append(predictor)
        reports.append(report)
    return predictors, reports


def split_held(texts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Texts to learn from, and every tenth to judge by.

    Raises:
        ConfigError: fewer than ten.
    """
    if len(texts) < 10:
        raise ConfigError(f"{len(texts)} texts are too few to calibrate on; give at least 10")
    held = [text for place, text in enumerate(texts) if place % 10 == 9]
    return [text for place, text in enumerate(texts) if place % 10 != 9], held


def _gate_of(feed: FeedForward) -> tuple[Tensor, Tensor]:
    """Weight (F, E) and bias (F,) of what the ReLU is applied to."""
    assert isinstance(feed.up, Linear)
    width = feed.up.weight.shape[0] // (2 if feed.gated else 1)
    weight = feed.up.weight[:width].detach()
    return weight, weight.new_zeros(width) if feed.up.bias is None else feed.up.bias[:width].detach()


@torch.no_grad()
def gates_of(feed: FeedForward, x: Tensor) -> Tensor:
    """(n, E) -> (n, F): positive is what really is active."""
    return F.linear(x, *_gate_of(feed))


@torch.no_grad()
def _start(feed: FeedForward, gates: Tensor, config: PredictorConfig) -> Predictor:
    """The map of this rank that is nearest to the layer's own where it gave these gates: their principal directions."""
    weight, bias = (part.float() for part in _gate_of(feed))
    gates = gates.float()
    mean = gates.mean(0)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        directions = torch.pca_lowrank(gates, min(config.rank, *gates.shape))[2]
    down, up = directions.T @ weight, directions
    scale = (down.norm() / up.norm()).clamp(min=1e-12).sqrt()
    return Predictor(down / scale, up * scale, mean + directions @ (directions.T @ (bias - mean)))


@torch.no_grad()
def inputs_of(model: Decoder, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """What enters the feed-forward of each layer, (tokens, E), for one layer after the other."""
    steps = [Step.dense(1, len(text)) for text in texts]
    rows = [model.embed(torch.tensor(text), step) for text, step in zip(texts, steps, strict=True)]
    for layer in model.layers:
        rows = [layer.attend(h, step) for h, step in zip(rows, steps, strict=True)]  # type: ignore[operator]
        yield torch.cat([h if layer.ffn_norm is None else layer.ffn_norm(h) for h in rows])  # type: ignore[operator]
        rows = [layer.feed(h, step) for h, step in zip(rows, steps, strict=True)]  # type: ignore[operator]


def _train(start: Predictor, x: Tensor, truth: Tensor, config: PredictorConfig) -> Predictor:
    generator = torch.Generator().manual_seed(config.seed)
    x = x.float()
    down, up, bias = (part.clone().requires_grad_() for part in (start.down, start.up, start.bias))
    share = truth.float().mean(0).clamp(1e-3, 1 - 1e-3)
    weight = ((1 - share) / share) ** config.balance
    optimiser = torch.optim.AdamW([down, up, bias], lr=config.learning_rate, weight_decay=0.0)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(config.batch_tokens):
            scores = F.linear(F.linear(x[rows], down), up, bias)
            loss = F.binary_cross_entropy_with_logits(scores, truth[rows].float(), pos_weight=weight)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return Predictor(down.detach(), up.detach(), bias.detach())


@torch.no_grad()
def _calibrate(
    layer: int, predictor: Predictor, x: Tensor, truth: Tensor, recall: float
) -> tuple[Predictor, PredictorReport]:
    """The predictor with the threshold that finds ``recall`` of what is active, and how it does."""
    scores = predictor.scores(x)
    found = scores[truth].sort().values
    threshold = found[int((1 - recall) * (len(found) - 1))].item() if len(found) else 0.0
    threshold -= 1e-6 * abs(threshold) + 1e-7  # the one at the threshold is found too
    shifted = replace(predictor, bias=predictor.bias - threshold)
    guess = shifted.scores(x) > 0
    hits = (guess & truth).sum().item()
    report = PredictorReport(
        layer,
        recall=hits / max(1, truth.sum().item()),
        precision=hits / max(1, guess.sum().item()),
        active_share=truth.float().mean().item(),
        predicted_share=guess.float().mean().item(),
    )
    return shifted, report


def save_predictors(store: Store, predictors: Sequence[Predictor]) -> None:
    """Put predictors into a store, for it alone.

    Raises:
        CheckpointError: the disk is full or may not be written.
    """
    tensors = {}
    for layer, predictor in enumerate(predictors):
        for name in ("down", "up", "bias"):
            tensors[f"layers.{layer}.{name}"] = getattr(predictor, name)
    with staged(store.folder) as staging:
        write_tensors(staging / FILE, tensors)


def predictor_bytes(store: Store) -> int:
    """Bytes that the predictors of a store take in memory; 0 where there are none."""
    path = store.folder / FILE
    return path.stat().st_size if store.layout == "neurons" and path.is_file() else 0


def load_predictors(store: Store) -> list[Predictor]:
    """The predictors of a store.

    Raises:
        NotFoundError: it has none.
        MismatchError: they are for another model.
    """
    path = Path(store.folder) / FILE
    if not path.is_file():
        raise NotFoundError(
            f"{store.folder} has neurons and no {FILE}; train it (vivace convert --calibrate FILE), or convert with "
            "layout selected, which needs none"
        )
    tensors, c = read_tensors(path), store.config
    predictors = []
    for layer in range(c.num_layers):
        parts = [tensors.get(f"layers.{layer}.{name}") for name in ("down", "up", "bias")]
        down, up, bias = parts
        if down is None or up is None or bias is None or down.shape[1] != c.width or up.shape[0] != c.ffn_width:
            raise MismatchError(f"{path} does not fit layer {layer} of this model; train it again")
        predictors.append(Predictor(down, up, bias))
    return predictors

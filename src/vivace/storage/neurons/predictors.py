"""Predictors of which neurons of a ReLU feed-forward will be active, of low rank, from its input.

``active = up(down(x)) + bias > threshold`` with ``down`` (r, E) and ``up`` (F, r), trained on what really is active
(Alizadeh et al. 2023, arXiv:2312.11514, section 3.1; after Liu et al. 2023, Deja Vu, arXiv:2310.17157). The losses of
active and inactive neurons are balanced. The threshold of each layer is set to the recall that is asked for, or (ours)
to the error of the layer's output that is allowed, on texts held back from training. Training starts (ours) from the r
directions in which the layer's values before its ReLU vary most, and keeps them where it finds nothing better.
Predictors are judged and stored in the model's dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.files import read_metadata, read_tensors, staged, summary, write_tensors
from vivace.core.layers import FeedForward
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError
from vivace.kernels.native import Matrix, NativeBody
from vivace.storage.neurons.outputs import LayersInOrder, NeuronOutputs, check_error, feeds_of, gate_of, most_within
from vivace.storage.store import Store
from vivace.train.rows import RowsConfig, fit_rows

FILE = "predictors.safetensors"
PARTS = ("down", "up", "bias")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
AGAIN = "calibrate again (vivace convert --store --layout neurons --calibrate FILE)"
"""What to do about predictors that cannot be used."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """The predictor of one layer."""

    down: Tensor
    """(r, E)."""
    up: Tensor
    """(F, r)."""
    bias: Tensor
    """(F,), with the threshold subtracted; float32."""

    def active(self, x: Tensor, body: NativeBody | None = None) -> Tensor:
        """Return the neurons that any row of ``x`` (T, E) probably needs, (n,) ascending; ``body`` as in ``scores``."""
        return (self.scores(x, body) > 0).any(0).nonzero()[:, 0]

    def scores(self, x: Tensor, body: NativeBody | None = None) -> Tensor:
        """Score neurons, (T, E) -> (T, F), positive where one is predicted; ``body`` multiplies in bfloat16."""
        if body is not None and x.dtype == self.down.dtype == torch.bfloat16:
            down, up = (Matrix(part, None, part.shape[1], part.shape[0]) for part in (self.down, self.up))
            return body.linear(up, body.linear(down, x)).float() + self.bias
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up).float() + self.bias

    def to(self, dtype: torch.dtype) -> Predictor:
        """Return the same with its matrices in another dtype."""
        return replace(self, down=self.down.to(dtype), up=self.up.to(dtype))

    def in_order(self, order: Tensor) -> Predictor:
        """Return the same for neurons in another order: number ``order[i]`` lies at place i, with ``order`` (F,)."""
        return replace(self, up=self.up[order], bias=self.bias[order])


@dataclass(frozen=True)
class PredictorConfig:
    """How predictors are trained."""

    rank: int = 64
    recall: float = 0.99
    """Share of the active neurons that must be found, on texts held back."""
    error: float | None = None
    """Instead of the recall: the most that the output of a layer may change by neurons that are not found, as the norm
    of the change over that of the output, mean over texts held back."""
    epochs: int = 4
    """Passes over the texts; 0 keeps the directions that training starts from."""
    learning_rate: float = 1e-3
    batch_tokens: int = 256
    balance: float = 0.5
    """Exponent on inactive / active, which is the weight of an active neuron in the loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise ConfigError(f"recall is a share in (0, 1], found {self.recall}")
        check_error(self.error)
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")


@dataclass(frozen=True)
class PredictorReport:
    """How good the predictor of a layer is on texts held back."""

    layer: int
    recall: float
    precision: float
    active_share: float
    """Mean share of neurons that are active for a token."""
    predicted_share: float
    """Mean share of neurons that are predicted for a token."""
    error: float
    """Norm of the change of the feed-forward's output over the norm of the output, mean over tokens."""


def train_predictors(
    model: LayersInOrder, texts: Sequence[Sequence[int]], config: PredictorConfig
) -> tuple[list[Predictor], list[PredictorReport]]:
    """Train the predictors of a model, layer after layer.

    Args:
        model: with ReLU feed-forwards.
        texts: token ids; every tenth is held back to set thresholds by.
        config: how they are trained.

    Raises:
        ConfigError: fewer than ten texts, or a model without ReLU.
    """
    c = model.config
    if c.activation != "relu" or c.moe is not None:
        raise ConfigError(f"predictors are for feed-forwards with relu, this model has {c.activation}")
    learned, held = split_held(texts)
    predictors, reports = [], []
    for layer, (feed, (x, x_held)) in enumerate(feeds_of(model, learned, held)):
        gates, outputs = gates_of(feed, x), NeuronOutputs(feed, x_held)
        tried = [_start(feed, gates, config)]
        if config.epochs:
            tried.append(_train(tried[0], x, gates > 0, config))
        found = [_calibrate(layer, predictor.to(x.dtype), x_held, outputs, config) for predictor in tried]
        predictor, report = min(found, key=lambda one: one[1].predicted_share)
        predictors.append(predictor)
        reports.append(report)
    return predictors, reports


def split_held(texts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Split texts into those to learn from, and every tenth to judge by.

    Raises:
        ConfigError: there are fewer than ten.
    """
    if len(texts) < 10:
        raise ConfigError(f"{len(texts)} texts are too few to calibrate on; give at least 10")
    held = [text for place, text in enumerate(texts) if place % 10 == 9]
    return [text for place, text in enumerate(texts) if place % 10 != 9], held


@torch.no_grad()
def gates_of(feed: FeedForward, x: Tensor) -> Tensor:
    """Return what the ReLU is applied to, (n, E) -> (n, F); positive values are the neurons that really are active."""
    return F.linear(x, *gate_of(feed))


@torch.no_grad()
def _start(feed: FeedForward, gates: Tensor, config: PredictorConfig) -> Predictor:
    """Return the map of this rank that is nearest to the layer's own on these gates, by their principal directions."""
    weight, bias = gate_of(feed)
    gates = gates.float()
    mean = gates.mean(0)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        directions = torch.pca_lowrank(gates, min(config.rank, *gates.shape))[2]
    down, up = directions.T @ weight.float(), directions
    scale = (down.norm() / up.norm()).clamp(min=1e-12).sqrt()
    return Predictor(
        down / scale, up * scale, mean + directions @ (directions.T @ ((0 if bias is None else bias.float()) - mean))
    )


def _train(start: Predictor, x: Tensor, truth: Tensor, config: PredictorConfig) -> Predictor:
    """Train a predictor on inputs ``x`` (n, E) of which ``truth`` (n, F) says what is active."""
    x = x.float()
    down, up, bias = (part.clone().requires_grad_() for part in (start.down, start.up, start.bias))
    share = truth.float().mean(0).clamp(1e-3, 1 - 1e-3)
    weight = ((1 - share) / share) ** config.balance

    def loss(rows: Tensor) -> Tensor:
        scores = F.linear(F.linear(x[rows], down), up, bias)
        return F.binary_cross_entropy_with_logits(scores, truth[rows].float(), pos_weight=weight)

    how = RowsConfig(epochs=config.epochs, batch_rows=config.batch_tokens, rate=config.learning_rate, seed=config.seed)
    fit_rows([down, up, bias], loss, len(x), how)
    return Predictor(down.detach(), up.detach(), bias.detach())


@torch.no_grad()
def _calibrate(
    layer: int, predictor: Predictor, x: Tensor, outputs: NeuronOutputs, config: PredictorConfig
) -> tuple[Predictor, PredictorReport]:
    """Set the threshold that finds as many active neurons as are asked for, and measure the predictor with it."""
    truth = outputs.gate > 0
    scores = predictor.scores(x)
    found = scores[truth].sort().values
    if not len(found):
        threshold = 0.0
    elif config.error is None:
        threshold = found[int((1 - config.recall) * (len(found) - 1))].item()
    else:
        missed = most_within(config.error, len(found), lambda at: outputs.error(truth & (scores < found[at])))
        threshold = found[missed].item()
    threshold -= 1e-6 * abs(threshold) + 1e-7  # rounding must not lose the neuron at the threshold
    shifted = replace(predictor, bias=predictor.bias - threshold)
    guess = shifted.scores(x) > 0
    hits = (guess & truth).sum().item()
    report = PredictorReport(
        layer,
        recall=hits / max(1, truth.sum().item()),
        precision=hits / max(1, guess.sum().item()),
        active_share=truth.float().mean().item(),
        predicted_share=guess.float().mean().item(),
        error=outputs.error(truth & ~guess),
    )
    return shifted, report


def save_predictors(store: Store, predictors: Sequence[Predictor]) -> None:
    """Write predictors into the folder of the store that they were trained for, which they name.

    Raises:
        CheckpointError: the disk is full or may not be written.
    """
    tensors = {}
    for layer, predictor in enumerate(predictors):
        for name in PARTS:
            tensors[f"layers.{layer}.{name}"] = getattr(predictor, name)
    facts = {"identity": store.identity, "checksum": _checksum(tensors)}
    with staged(store.folder) as staging:
        write_tensors(staging / FILE, tensors, facts)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the names, dtypes, shapes and bytes of tensors, in hexadecimal digits."""
    checksum = 0
    for name, values in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {values.dtype} {tuple(values.shape)}".encode(), checksum)
        checksum = zlib.crc32(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def predictor_bytes(store: Store) -> int:
    """Return the bytes that the predictors of a store take in memory; 0 where there are none."""
    path = store.folder / FILE
    return path.stat().st_size if store.layout == "neurons" and path.is_file() else 0


def load_predictors(store: Store) -> list[Predictor]:
    """Read the predictors of a store.

    Files of earlier versions name no store and have no checksum; they are taken where their tensors fit the model.

    Raises:
        NotFoundError: it has none.
        MismatchError: they are for another store or model.
        CorruptError: the file is damaged.
    """
    path = Path(store.folder) / FILE
    if not path.is_file():
        raise NotFoundError(
            f"{store.folder} has neurons and no {FILE}; train it (vivace convert --calibrate FILE), or convert with "
            "layout selected, which needs none"
        )
    try:
        tensors, facts = read_tensors(path), read_metadata(path)
    except CorruptError as exc:
        raise CorruptError(f"{exc}; {AGAIN}") from exc
    if "identity" in facts and facts["identity"] != store.identity:
        raise MismatchError(f"{path} belongs to another store; {AGAIN}")
    if "checksum" in facts and facts["checksum"] != _checksum(tensors):
        raise CorruptError(f"{path} is damaged: its tensors do not have the checksum that it names; {AGAIN}")
    layers = range(store.config.num_layers)
    if strange := sorted(tensors.keys() - {f"layers.{layer}.{name}" for layer in layers for name in PARTS}):
        raise MismatchError(f"{path} does not fit this model, which has no {summary(strange)}; {AGAIN}")
    return [_predictor(store, path, layer, tensors) for layer in layers]


def _predictor(store: Store, path: Path, layer: int, tensors: Mapping[str, Tensor]) -> Predictor:
    """Return the predictor of a layer, checked; raises as ``load_predictors``."""
    parts = [tensors.get(f"layers.{layer}.{name}") for name in PARTS]
    down, up, bias = parts
    count, width = store.config.ffn_width, store.config.width
    if (
        down is None
        or up is None
        or bias is None
        or not down.ndim == up.ndim == 2
        or not down.shape[0] == up.shape[1] > 0
        or (down.shape[1], up.shape[0], *bias.shape) != (width, count, count)
        or down.dtype != up.dtype
        or not {down.dtype, bias.dtype} <= set(DTYPES)
    ):
        raise MismatchError(f"{path} does not fit layer {layer} of this model; {AGAIN}")
    if not all(part.isfinite().all() for part in (down, up, bias)):
        raise CorruptError(f"{path} is damaged: layer {layer} has values that are no finite numbers; {AGAIN}")
    return Predictor(down, up, bias)

"""What a text says about the matrices of a decoder: which inputs they see, and how much their outputs matter.

With inputs x and the gradient g of the log-probability of a token that is drawn from the model itself, a row at a time:

* moments ``H``: the mean of ``x x^T``, (in, in);
* gains: the mean of ``g^2``, (out,);
* squares: the mean of the squared gradient of each weight, (out, in), which is Fisher's information.

Tokens are drawn, and so outputs matter, where the text's own are scored: those of a prompt are not predicted in use
either. What changes at a prompt's rows still counts, through the answer's tokens that read them.

A small change E of a matrix then changes the model's distribution by about ``1/2 sum_o gains_o (E H E^T)_oo`` nats a
token (Kronecker-factored curvature: Martens & Grosse 2015, arXiv:1503.05671). Tokens are drawn from the model and not
taken from the text since only then the mean of squared gradients is the curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.layers import FeedForward, Linear
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.palette.texts import real_rows
from vivace.train.data import TokenBatch
from vivace.train.distillation import divergence, head_in_parts, rows_at_once
from vivace.train.objective import LossPart


def matrices(model: Decoder) -> dict[str, Linear]:
    """Return the matrices of the layers by the names of their parameters.

    Raises:
        UnsupportedError: a layer has experts, or weights that are not in memory.
    """
    return {name: part for index in range(len(model.layers)) for name, part in matrices_of(model, index).items()}


def matrices_of(model: Decoder, index: int) -> dict[str, Linear]:
    """Return the matrices of one layer; raises as ``matrices``."""
    layer = model.layers[index]
    assert isinstance(layer, Layer)
    feed = layer.feed_forward
    if not isinstance(feed, FeedForward):
        raise UnsupportedError("mixtures of experts are not rounded to palettes; q4 keeps their experts in four bits")
    parts: dict[str, nn.Module] = {"qkv": layer.qkv, "o": layer.o, "feed_forward.up": feed.up}
    parts["feed_forward.down"] = feed.down
    if not all(type(part) is Linear for part in parts.values()):
        raise UnsupportedError("weights that are streamed or packed cannot be rounded; load them with kernels='torch'")
    return {f"layers.{index}.{name}.weight": part for name, part in parts.items() if isinstance(part, Linear)}


@dataclass
class Statistics:
    """Sums over the rows of a text, by the names of the matrices' parameters."""

    moments: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    num_rows: int = 0
    num_scored: int = 0
    """Rows at which a token was drawn."""

    def mean_gains(self, name: str) -> Tensor:
        """Return the squared gradients of a matrix's outputs, summed over all rows, by token that is scored, (out,)."""
        return self.gains[name] / max(1, self.num_scored)

    def mean_moments(self, name: str) -> Tensor:
        """Return H of a matrix, (in, in)."""
        return self.moments[name] / max(1, self.num_rows)


@contextmanager
def watched_inputs(parts: dict[str, Linear], rows: Tensor, into: Statistics) -> Iterator[None]:
    """Add ``x x^T`` of the inputs of matrices to the moments while the block runs.

    Args:
        parts: matrices by name.
        rows: (n,) packed rows of the call that count.
        into: where the sums are kept.
    """

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])[rows].float()
            product = x.mT @ x
            into.moments[name] = into.moments[name].add_(product) if name in into.moments else product

        return add

    handles = [part.register_forward_pre_hook(hook(name)) for name, part in parts.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gather(
    model: Decoder,
    batches: Sequence[TokenBatch],
    *,
    squares: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Statistics:
    """Run a text forward and backward, and return moments and gains, or the squares of gradients instead of both.

    Args:
        model: the decoder, frozen.
        batches: the text.
        squares: whether the squared gradient of every weight is asked for.
        seed: of the tokens that are drawn.
        progress: called with the number of batches that are done, and of all.
    """
    parts, found, generator = matrices(model), Statistics(), torch.Generator().manual_seed(seed)
    for number, batch in enumerate(batches, 1):
        rows = real_rows(batch)
        found.num_rows += len(rows)
        found.num_scored += len(batch.predicting)
        if squares:
            _add_squares(model, parts, batch, found, generator)
        else:
            with watched_inputs(parts, rows, found), _watched_gains(parts, found):
                _backward(model, batch, generator)
        progress(number, len(batches))
    return found


@contextmanager
def _watched_gains(parts: dict[str, Linear], into: Statistics) -> Iterator[None]:
    """Add the squares of gradients of the outputs of matrices to the gains while the block runs."""

    def adding(name: str) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            square = gradient.float().square().reshape(-1, gradient.shape[-1]).sum(0)
            into.gains[name] = into.gains[name] + square if name in into.gains else square

        return add

    def hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, inputs, output: output.register_hook(adding(name)) and None

    handles = [part.register_forward_hook(hook(name)) for name, part in parts.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_squares(
    model: Decoder,
    parts: dict[str, Linear],
    batch: TokenBatch,
    found: Statistics,
    generator: torch.Generator,
) -> None:
    for part in parts.values():
        part.weight.requires_grad_(True)
    try:
        _backward(model, batch, generator)
        for name, part in parts.items():
            assert part.weight.grad is not None
            square = part.weight.grad.float().square()
            found.squares[name] = found.squares[name].add_(square) if name in found.squares else square
    finally:
        for part in parts.values():
            part.weight.requires_grad_(False)
            part.weight.grad = None


def _backward(model: Decoder, batch: TokenBatch, generator: torch.Generator) -> None:
    """Backpropagate the sum over scored rows of the log-probabilities of tokens that the model draws."""
    step = Step.dense(*batch.tokens.shape)
    with torch.enable_grad():
        h = model.embed(batch.tokens.reshape(-1), step).detach().requires_grad_()
        top = model.run(h, step, 0, len(model.layers))[batch.predicting]

        def part_of(h: Tensor, part: slice) -> LossPart:
            logits = model.head(h).float()
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            return F.cross_entropy(logits, drawn, reduction="sum"), {}

        for loss, _ in head_in_parts(top, rows_at_once(1024, model.config.vocab_size), part_of):
            loss.backward()


@dataclass(frozen=True)
class Distance:
    """How far a rounded model is from the stored one, in nats a token of a text."""

    kl: float
    """Mean divergence of its distribution from the stored model's."""
    loss: float
    """Its mean negative log-likelihood of the scored tokens."""
    stored_loss: float
    """That of the stored model."""


@torch.no_grad()
def distance(
    model: Decoder,
    stored: Decoder,
    batches: Sequence[TokenBatch],
    worn: Sequence[Callable[[Tensor], LowRankDeltas]] = (),
) -> Distance:
    """Compare two decoders on a text.

    Args:
        model: the decoder that is judged.
        stored: the one that it is compared with.
        batches: the text.
        worn: give the low-rank deltas that rows of ``model`` wear, from their places (T,) in each.
    """
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for batch in batches:
        rows, targets = batch.predicting, batch.targets
        tops = []
        for each in (model, stored):
            step = Step.dense(*batch.tokens.shape)
            if each is model and worn:
                step = replace(step, deltas=tuple(deltas(torch.zeros_like(step.slot)) for deltas in worn))
            tops.append(each.run(each.embed(batch.tokens.reshape(-1), step), step)[rows])
        at_once = rows_at_once(1024, model.config.vocab_size)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            guess, truth = (each.head(top[part]).float() for each, top in zip((model, stored), tops, strict=True))
            losses = [F.cross_entropy(logits, targets[part], reduction="sum") for logits in (guess, truth)]
            sums += torch.stack([divergence(guess, truth), *losses]).double()
        count += len(rows)
    kl, loss, stored_loss = (sums / max(1, count)).tolist()
    return Distance(kl, loss, stored_loss)

"""Thresholds below which neurons of a gated feed-forward are left out (layout ``selected``).

Each layer has one: the quantile of |act(gate(x))| over texts that leaves the share of neurons asked for (Lee et al.
2024, CATS, arXiv:2404.08763). Without a file of thresholds all are 0, so only neurons that are exactly zero are left
out. How much leaving out changes the output of each layer is measured on texts held back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.files import read_json
from vivace.core.layers import FeedForward, Linear, activate
from vivace.core.model import Decoder
from vivace.errors import ConfigError, MismatchError
from vivace.files import write_text
from vivace.storage.neurons.predictors import inputs_of, split_held
from vivace.storage.store import Store

FILE = "thresholds.json"


@dataclass(frozen=True)
class ThresholdReport:
    """The effect of a threshold on a layer, on texts held back."""

    layer: int
    threshold: float
    active_share: float
    """Mean share of neurons that are kept for a token."""
    error: float
    """Norm of the change of the feed-forward's output over the norm of the output, mean over tokens."""


def find_thresholds(model: Decoder, texts: Sequence[Sequence[int]], active: float) -> list[ThresholdReport]:
    """Find the thresholds that keep a share of the neurons.

    Args:
        model: with all weights in memory.
        texts: token ids; every tenth is held back to report on.
        active: share of the neurons to keep, (0, 1].

    Raises:
        ConfigError: the share is impossible, or there are fewer than ten texts.
    """
    if not 0 < active <= 1:
        raise ConfigError(f"active is a share in (0, 1], found {active}")
    learned, held = split_held(texts)
    reports = []
    for layer, (x, x_held) in enumerate(zip(inputs_of(model, learned), inputs_of(model, held), strict=True)):
        feed = model.layers[layer].feed_forward
        assert isinstance(feed, FeedForward)
        sizes = _gate(feed, x).abs().flatten().float()
        threshold = 0.0 if active == 1 else sizes.kthvalue(max(1, int((1 - active) * len(sizes)))).values.item()
        reports.append(_report(layer, feed, x_held, threshold))
    return reports


def _gate(feed: FeedForward, x: Tensor) -> Tensor:
    """Return the activations of the selector, (n, E) -> (n, F)."""
    assert isinstance(feed.up, Linear)
    width = feed.up.weight.shape[0] // (2 if feed.gated else 1)
    bias = None if feed.up.bias is None else feed.up.bias[:width]
    return activate(F.linear(x, feed.up.weight[:width], bias), feed.activation)


@torch.no_grad()
def _report(layer: int, feed: FeedForward, x: Tensor, threshold: float) -> ThresholdReport:
    gate = _gate(feed, x)
    kept = torch.where(gate.abs() > threshold, gate, 0.0)
    up: Tensor | float = 1.0
    if feed.gated:
        assert isinstance(feed.up, Linear)
        width = gate.shape[1]
        up = F.linear(x, feed.up.weight[width:], None if feed.up.bias is None else feed.up.bias[width:])
    assert isinstance(feed.down, Linear)
    whole, change = (F.linear(inner * up, feed.down.weight).float() for inner in (gate, gate - kept))
    error = (change.norm(dim=-1) / whole.norm(dim=-1).clamp_min(1e-12)).mean().item()
    return ThresholdReport(layer, threshold, (kept != 0).float().mean().item(), error)


def save_thresholds(store: Store, reports: Sequence[ThresholdReport]) -> None:
    """Write thresholds into a store."""
    found = {"identity": store.identity, "thresholds": [report.threshold for report in reports]}
    write_text(store.folder / FILE, json.dumps(found, indent=1) + "\n")


def load_thresholds(store: Store) -> list[float]:
    """Read the thresholds of a store, which are all 0 where it has no file of them.

    Raises:
        MismatchError: they are for another store.
    """
    path = store.folder / FILE
    if not path.is_file():
        return [0.0] * store.config.num_layers
    found = read_json(path)
    if found.get("identity") != store.identity or len(found.get("thresholds", ())) != store.config.num_layers:
        raise MismatchError(f"{path} belongs to another store; convert with --calibrate again, or remove it")
    return [float(threshold) for threshold in found["thresholds"]]

"""Thresholds below which neurons of a gated feed-forward are left out (layout ``selected``).

Each layer has one: the quantile of |act(gate(x))| over texts that leaves the share of neurons asked for (Lee et al.
2024, CATS, arXiv:2404.08763), or (ours) the largest that changes the layer's output by no more than is allowed. Without
a file of thresholds all are 0, so only neurons that are exactly zero are left out. How much leaving out changes the
output of each layer is measured on texts held back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.checkpoint.files import read_json
from vivace.errors import ConfigError, CorruptError, MismatchError
from vivace.files import write_text
from vivace.storage.neurons.outputs import LayersInOrder, NeuronOutputs, check_error, feeds_of, most_within
from vivace.storage.neurons.predictors import split_held
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


STEPS = 1024
"""Number of thresholds among which the largest within an error is looked for."""


def find_thresholds(
    model: LayersInOrder, texts: Sequence[Sequence[int]], active: float = 0.5, error: float | None = None
) -> list[ThresholdReport]:
    """Find the thresholds that keep a share of the neurons, or change no layer by more than an error.

    Args:
        model: without mixtures of experts.
        texts: token ids; every tenth is held back to report on.
        active: share of the neurons to keep, (0, 1].
        error: most that the output of a layer may change on the other texts, as in ``ThresholdReport``; then each layer
            keeps as few neurons as that allows, and ``active`` does not count.

    Raises:
        ConfigError: the share or the error is impossible, or there are fewer than ten texts.
    """
    check_shares(active, error)
    learned, held = split_held(texts)
    reports = []
    for layer, (feed, (x, x_held)) in enumerate(feeds_of(model, learned, held)):
        threshold = _threshold(NeuronOutputs(feed, x), active, error)
        reports.append(_report(layer, NeuronOutputs(feed, x_held), threshold))
    return reports


def check_shares(active: float, error: float | None) -> None:
    """Refuse a share of neurons, or an error, that cannot be.

    Raises:
        ConfigError: it cannot be.
    """
    if not 0 < active <= 1:
        raise ConfigError(f"active is a share in (0, 1], found {active}")
    check_error(error)


def _threshold(outputs: NeuronOutputs, active: float, error: float | None) -> float:
    """Return the threshold of a layer, below which and at which neurons are left out."""
    if error is None and active == 1:
        return 0.0
    sizes = outputs.gate.abs().float()
    rising = sizes.flatten().sort().values
    if error is None:
        return float(rising[_place(len(rising), 1 - active)])
    places = [_place(len(rising), step / STEPS) for step in range(1, STEPS)]
    tried: list[float] = [0.0, *rising[places].tolist()]
    return tried[most_within(error, STEPS, lambda at: outputs.error(sizes <= tried[at]))]


def _place(count: int, share: float) -> int:
    """Return where, of so many rising numbers, the one lies of which a share of all is at most as large."""
    return max(0, int(share * count) - 1)


def _report(layer: int, outputs: NeuronOutputs, threshold: float) -> ThresholdReport:
    left_out = outputs.gate.abs() <= threshold
    return ThresholdReport(layer, threshold, 1 - left_out.float().mean().item(), outputs.error(left_out))


def save_thresholds(store: Store, reports: Sequence[ThresholdReport]) -> None:
    """Write thresholds into a store."""
    found = {"identity": store.identity, "thresholds": [report.threshold for report in reports]}
    write_text(store.folder / FILE, json.dumps(found, indent=1) + "\n")


def load_thresholds(store: Store) -> list[float]:
    """Read the thresholds of a store, which are all 0 where it has no file of them.

    Raises:
        MismatchError: they are for another store.
        CorruptError: they are no numbers.
    """
    path = store.folder / FILE
    if not path.is_file():
        return [0.0] * store.config.num_layers
    found = read_json(path)
    numbers: Any = found.get("thresholds")
    is_list = isinstance(numbers, list)
    if found.get("identity") != store.identity or (is_list and len(numbers) != store.config.num_layers):
        raise MismatchError(f"{path} belongs to another store; convert with --calibrate again, or remove it")
    if not is_list or not all(isinstance(number, float | int) and math.isfinite(number) for number in numbers):
        raise CorruptError(f"{path}: a threshold is no number; convert with --calibrate again, or remove it")
    return [float(number) for number in numbers]

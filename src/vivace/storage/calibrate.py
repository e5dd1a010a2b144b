"""What a store of neurons needs beside its weights: predictors or thresholds, found with the whole model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vivace.checkpoint.load import load_decoder
from vivace.errors import ConfigError
from vivace.storage.ordering import load_orders
from vivace.storage.predictors import PredictorConfig, PredictorReport, save_predictors, train_predictors
from vivace.storage.store import Store
from vivace.storage.thresholds import ThresholdReport, find_thresholds, save_thresholds


def calibrate(
    model: str | Path,
    store: Store,
    texts: Sequence[Sequence[int]],
    active: float = 0.5,
    predictors: PredictorConfig | None = None,
) -> Sequence[PredictorReport] | Sequence[ThresholdReport]:
    """Write predictors (layout ``neurons``) or thresholds (layout ``selected``) into a store.

    Args:
        model: the checkpoint it was made from.
        store: where to.
        texts: token ids, ten at least.
        active: share of the neurons that thresholds keep.
        predictors: how they are trained.

    Returns:
        How good they are on texts held back, layer by layer.

    Raises:
        ConfigError: a layout that needs neither, or too few texts.
    """
    if store.layout == "layers":
        raise ConfigError("layout layers keeps every neuron: there is nothing to calibrate; leave it out")
    decoder = load_decoder(model, dtype=store.dtype)
    if store.layout == "neurons":
        trained, found = train_predictors(decoder, texts, predictors or PredictorConfig())
        orders = load_orders(store.folder)
        if orders is not None:
            trained = [each.in_order(order) for each, order in zip(trained, orders, strict=True)]
        save_predictors(store, trained)
        return found
    reports = find_thresholds(decoder, texts, active)
    save_thresholds(store, reports)
    return reports

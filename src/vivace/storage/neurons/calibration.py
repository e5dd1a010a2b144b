"""Calibration of a store of neurons: finds its predictors or thresholds on texts, with the whole model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vivace.checkpoint.load import load_decoder
from vivace.errors import ConfigError
from vivace.storage.neurons.ordering import load_orders
from vivace.storage.neurons.predictors import PredictorConfig, PredictorReport, save_predictors, train_predictors
from vivace.storage.neurons.thresholds import ThresholdReport, find_thresholds, save_thresholds
from vivace.storage.store import Store


def calibrate(
    model: str | Path,
    store: Store,
    texts: Sequence[Sequence[int]],
    active: float = 0.5,
    predictors: PredictorConfig | None = None,
    *,
    ignored: Sequence[str] = (),
) -> Sequence[PredictorReport] | Sequence[ThresholdReport]:
    """Find predictors (layout ``neurons``) or thresholds (layout ``selected``), and write them into a store.

    Args:
        model: the checkpoint it was made from.
        store: where they are written.
        texts: token ids of at least ten texts.
        active: share of the neurons that thresholds keep.
        predictors: how they are trained.
        ignored: unknown keys of the checkpoint's config.json that are read as if they were not there.

    Returns:
        Reports on texts held back, one for each layer.

    Raises:
        ConfigError: a layout that needs neither, or too few texts.
    """
    if store.layout == "layers":
        raise ConfigError("layout layers keeps every neuron: there is nothing to calibrate; leave it out")
    decoder = load_decoder(model, dtype=store.dtype, ignored=ignored)
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

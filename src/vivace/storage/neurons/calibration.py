"""Calibration of a store of neurons: finds its predictors or thresholds on texts, with one layer in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from vivace.checkpoint.layerwise import LayerwiseDecoder
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError
from vivace.kernels.reference import any_order
from vivace.prompts import Prompt
from vivace.storage.neurons.ordering import load_orders
from vivace.storage.neurons.predictors import (
    PredictorConfig,
    PredictorReport,
    save_predictors,
    split_held,
    train_predictors,
)
from vivace.storage.neurons.thresholds import ThresholdReport, check_shares, find_thresholds, save_thresholds
from vivace.storage.store import Layout, Store


def texts_of(tokenizer: Tokenizer, rows: Iterable[Prompt]) -> list[tuple[int, ...]]:
    """Return rows in tokens, each prompt followed by its first reference answer if it has one."""
    texts = []
    for row in rows:
        answer = tokenizer.encode(row.references[0], special=False) if row.references else []
        texts.append((*tokenizer.encode_prompt(row.request), *answer))
    return texts


def check_calibration(
    config: ModelConfig,
    layout: Layout,
    texts: Sequence[Sequence[int]],
    active: float = 0.5,
    error: float | None = None,
) -> None:
    """Refuse what ``calibrate`` would refuse, before a store is written.

    Raises:
        ConfigError: a layout that needs neither predictors nor thresholds, too few texts, an impossible share, or a
            text that the model cannot read, or that has no tokens.
    """
    for number, text in enumerate(texts, 1):
        if not text:
            raise ConfigError(f"text {number} has no tokens to calibrate on; leave it out")
        if len(text) > config.max_positions:
            raise ConfigError(f"text {number} has {len(text)} tokens, this model reads {config.max_positions}")
        if (strange := next((token for token in text if not 0 <= token < config.vocab_size), None)) is not None:
            raise ConfigError(f"text {number} has token {strange}; this model has tokens 0 to {config.vocab_size - 1}")
    if layout == "layers":
        raise ConfigError("layout layers keeps every neuron: there is nothing to calibrate; leave it out")
    check_shares(active, error)
    split_held(texts)


@any_order()
def calibrate(
    model: str | Path,
    store: Store,
    texts: Sequence[Sequence[int]],
    active: float = 0.5,
    predictors: PredictorConfig | None = None,
    *,
    error: float | None = None,
    ignored: Sequence[str] = (),
) -> Sequence[PredictorReport] | Sequence[ThresholdReport]:
    """Find predictors (layout ``neurons``) or thresholds (layout ``selected``), and write them into a store.

    Args:
        model: the checkpoint it was made from.
        store: where they are written.
        texts: token ids of at least ten texts.
        active: share of the neurons that thresholds keep.
        predictors: how they are trained.
        error: most that the output of a layer may change, instead of a share or a recall.
        ignored: unknown keys of the checkpoint's config.json that are read as if they were not there.

    Returns:
        Reports on texts held back, one for each layer.

    Raises:
        ConfigError: a layout that needs neither, or too few texts.
    """
    check_calibration(store.config, store.layout, texts, active, error)
    decoder = LayerwiseDecoder(model, store.dtype, ignored=ignored)
    if store.layout == "neurons":
        how = predictors or PredictorConfig()
        trained, found = train_predictors(decoder, texts, how if error is None else replace(how, error=error))
        orders = load_orders(store.folder)
        if orders is not None:
            trained = [each.in_order(order) for each, order in zip(trained, orders, strict=True)]
        save_predictors(store, trained)
        return found
    reports = find_thresholds(decoder, texts, active, error)
    save_thresholds(store, reports)
    return reports

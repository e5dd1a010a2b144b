"""The text that a model is rounded for: rows of tokens from prompt files, or from plain text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import ConfigError
from vivace.prompts import load_prompts, load_text
from vivace.train.data import Row, Rows, TokenBatch, collate, grouped, pairs_of

LEAST_ROWS = 8
"""Rows of text that rounding needs, of which one is held back."""


@dataclass(frozen=True)
class Texts:
    """Rows of tokens for rounding, and others for measuring what it costs."""

    calibration: Sequence[TokenBatch]
    """What weights are rounded for."""
    held_back: Sequence[TokenBatch]
    """What the result is measured on."""


def read_texts(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    longest: int,
    tokens_per_batch: int,
    seed: int = 0,
) -> Texts:
    """Read rows in a random order until there are enough.

    Args:
        paths: prompt files (.jsonl), with references or without, or plain text.
        tokenizer: the model's.
        num_tokens: tokens to calibrate on; an eighth of that is held back besides.
        longest: tokens of a row. Longer rows of prompt files end there; plain text is divided.
        tokens_per_batch: tokens of a batch, padding included.
        seed: of the order.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is not UTF-8 text.
        ConfigError: there are too few rows.
    """
    rows = [row for path in paths for row in _rows_of(path, tokenizer, longest)]
    if len(rows) < LEAST_ROWS:
        raise ConfigError(
            f"{len(rows)} rows of text are too few to round by: give at least {LEAST_ROWS}, better some hundred"
        )
    random.Random(seed).shuffle(rows)
    held_back, rest = _take(rows[: len(rows) // 2], num_tokens // 8)
    chosen, _ = _take([*rest, *rows[len(rows) // 2 :]], num_tokens)
    return Texts(*(_batches(part, tokens_per_batch) for part in (chosen, held_back)))


def real_rows(batch: TokenBatch) -> Tensor:
    """Return the packed rows b * T + t that hold a token and no padding, (n,)."""
    is_real = batch.scored.flip(1).int().cummax(1).values.flip(1).bool()
    return is_real.reshape(-1).nonzero()[:, 0]


def _rows_of(path: Path, tokenizer: Tokenizer, longest: int) -> list[Row]:
    if path.suffix == ".jsonl":
        prompts = load_prompts(path)
        asked = [prompt for prompt in prompts if not prompt.references]
        known = [prompt for prompt in prompts if prompt.references]
        rows = [Row(tuple(tokenizer.encode_prompt(prompt.request)[:longest]), 1) for prompt in asked]
        return rows + (Rows(tokenizer, longest, cuts=True).encode(pairs_of(known)) if known else [])
    tokens = tokenizer.encode(load_text(path), special=False)
    return [Row(tuple(tokens[at : at + longest]), 1) for at in range(0, len(tokens) - 1, longest)]


def _take(rows: Sequence[Row], num_tokens: int) -> tuple[list[Row], list[Row]]:
    """Return the first rows, at least one, that have so many tokens together, and the others."""
    count = 0
    for place, row in enumerate(rows):
        count += len(row.tokens)
        if count >= num_tokens:
            return list(rows[: place + 1]), list(rows[place + 1 :])
    return list(rows), []


def _batches(rows: Sequence[Row], tokens_per_batch: int) -> list[TokenBatch]:
    return [collate(group, torch.device("cpu")) for group in grouped(rows, tokens_per_batch)]

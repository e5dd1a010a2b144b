"""Choice of what is kept of a source: keys and values of each layer, or the encoder's states, with the reason.

``auto`` keeps keys and values, which costs less arithmetic, unless the memory given does not suffice for those of one
source of a usual length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from vivace.checkpoint.families import translate
from vivace.checkpoint.load import choose_dtype, least_bytes
from vivace.checkpoint.quantized.settings import dtype_of
from vivace.core.cache import slot_bytes, specs_of
from vivace.core.config import ModelConfig
from vivace.core.cross import Sources
from vivace.core.el_attention import ROUNDED, state_spec, why_no_states
from vivace.engine.execution import Execution
from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.kernels.low_bit import Weights
from vivace.units import format_bytes

NAMES = ("auto", *get_args(Sources))
USUAL_SOURCE, USUAL_TEXT = 1024, 256
"""Tokens of a source, and of the text that is written of it, for which memory has to suffice."""


@dataclass(frozen=True)
class SourceChoice:
    """What is kept of a source, and the reason."""

    name: Sources
    reason: str
    """Why; empty where there was nothing to choose."""


def choose_sources(
    asked: str, folder: Path, raw: Mapping[str, Any], execution: Execution, *, kv: str, limit: int | None
) -> SourceChoice:
    """Choose what is kept of sources, before a checkpoint is read.

    Args:
        asked: one of ``NAMES``.
        folder: of the checkpoint.
        raw: its configuration.
        execution: how it is to run.
        kv: format of keys and values.
        limit: bytes of memory; None for no limit.

    Raises:
        ConfigError: there is no such choice.
        UnsupportedError: the model, or what else was asked for, allows no EL-attention.
    """
    if asked not in NAMES:
        raise ConfigError(f"attention is {asked!r}{nearest(asked, NAMES)}")
    if asked == "shared":
        return SourceChoice("shared", "asked for")
    dtype, weights = execution.dtype, execution.weights
    config = translate(raw)
    obstacle = _obstacle(config, weights, kv)
    if asked == "el":
        if obstacle is not None:
            raise UnsupportedError(f"EL-attention is not for this model: {obstacle}; leave attention el out")
        return SourceChoice("el", "asked for")
    if config.encoder is None:
        return SourceChoice("shared", "")
    if limit is None:
        return SourceChoice("shared", "no limit of memory was given")
    kind = choose_dtype(dtype, dtype_of(raw) or "bfloat16", torch.device("cpu"))
    return _by_room(
        config, kind, limit - least_bytes(folder, dtype, weights, execution.ignored), obstacle, is_int8=kv == "int8"
    )


def _by_room(
    config: ModelConfig, dtype: torch.dtype, room: int, obstacle: str | None, *, is_int8: bool
) -> SourceChoice:
    """Choose by the bytes that are left beside the weights."""
    assert config.encoder is not None
    count, text = min(USUAL_SOURCE, config.encoder.max_positions), min(USUAL_TEXT, config.max_positions)
    specs = specs_of(config, is_int8=is_int8)
    shared, states = slot_bytes(specs, count, dtype), slot_bytes([state_spec(config)], count, dtype)
    needed = shared + slot_bytes(specs, text, dtype)
    what = f"keys and values of a source of {count} tokens take {format_bytes(shared)}"
    left = f"{format_bytes(max(0, room))} are left beside the weights"
    if needed <= room:
        return SourceChoice("shared", f"{what}, and {left}")
    tight = f"{what}, with a text of {text} tokens {format_bytes(needed)}, and {left}"
    if obstacle is not None:
        return SourceChoice("shared", f"{tight}, but EL-attention is not for this model: {obstacle}")
    return SourceChoice("el", f"{tight}; states of the source take {format_bytes(states)}")


def _obstacle(config: ModelConfig, weights: Weights, kv: str) -> str | None:
    """Return why there is no EL-attention here, or None where there is."""
    if (reason := why_no_states(config)) is not None:
        return reason
    if weights != "bf16":
        return f"with {weights} weights {ROUNDED}"
    return "kv int8 has keys and values in eight bits, and states are not rounded" if kv == "int8" else None

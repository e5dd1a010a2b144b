"""Settings that are not finite, and batches that hold no row, are refused by the recipe itself."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from vivace.errors import ConfigError
from vivace.methods.multistream.objective import MultistreamLoss
from vivace.methods.multistream.shared import SharedLoss
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.recipes.guard import GuardRecipe
from vivace.recipes.lora import LoraRecipe
from vivace.recipes.mod import ModRecipe
from vivace.recipes.seq2seq import Seq2SeqRecipe
from vivace.train.config import LoopConfig
from vivace.train.distillation import AlignedLoss, DistillationLoss
from vivace.train.supervised import Supervision

LOOP = LoopConfig(steps=2, warmup_steps=1)
DECODER = DecoderRecipe("decoder", (Stage(LOOP),))


def decoder(**settings: float) -> object:
    return DecoderRecipe("decoder", (Stage(LOOP),), **settings)  # type: ignore[arg-type]


def seq2seq(**settings: float) -> object:
    return Seq2SeqRecipe("seq2seq", LOOP, **settings)  # type: ignore[arg-type]


def lora(**settings: float) -> object:
    return LoraRecipe(loop=LOOP, **settings)  # type: ignore[arg-type]


def guard(penalties: float) -> object:
    return GuardRecipe(penalties=(0.1, penalties))


def mod(**settings: float) -> object:
    return ModRecipe("mod", DECODER, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (decoder, "exercises"),
        (decoder, "balance"),
        (decoder, "sparsity"),
        (seq2seq, "exercises"),
        (seq2seq, "base_rate"),
        (guard, "penalties"),
        (lora, "alpha"),
        (lora, "own_minutes"),
        (mod, "router_weight"),
        (LoopConfig, "minutes"),
        (DistillationLoss, "distillation"),
        (DistillationLoss, "cross_entropy"),
        (AlignedLoss, "alignment"),
        (AlignedLoss, "temperature"),
        (MultistreamLoss, "pruner"),
        (SharedLoss, "alpha"),
        (SharedLoss, "pruner"),
        (Supervision, "weight"),
    ],
)
def test_what_is_not_finite_is_refused(make: Callable[..., object], name: str) -> None:
    with pytest.raises(ConfigError, match=r"finite.*inf"):
        make(**{name: inf})


@pytest.mark.parametrize("make", [decoder, seq2seq, lora])
@pytest.mark.parametrize("size", [0, 7])
def test_batches_hold_a_row(make: Callable[..., object], size: int) -> None:
    with pytest.raises(ConfigError, match=r"tokens_per_batch (>=|must be at least) 8"):
        make(tokens_per_batch=size)

"""Rivals over the tiny decoders of the decoding tests, with random weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.decode.tiny_decoders import build
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.methods.eagle.drafter import Eagle, EagleConfig, EagleLayer
from vivace.methods.early_exit.drafter import Exit, ExitConfig, exit_drafter
from vivace.methods.lookahead.drafter import Lookahead, LookaheadPlan
from vivace.methods.medusa.drafter import Medusa, MedusaConfig, MedusaHeads
from vivace.methods.uno.drafter import Uno, UnoConfig, UnoDeltas

RIVALS: dict[str, tuple[object, object]] = {
    "medusa chain": (MedusaConfig(3), TreePlan((1, 1, 1))),
    "medusa tree": (MedusaConfig(3), TreePlan((3, 2, 1))),
    "medusa sparse": (MedusaConfig(4), TreePlan((4, 3, 2, 2), 11)),
    "medusa shared": (MedusaConfig(2, own_output=False), TreePlan((2, 2))),
    "eagle chain": (EagleConfig(), DraftPlan.chain(4)),
    "eagle unsure": (EagleConfig(ffn_width=24), DraftPlan((1, 1, 1, 1), 0.02)),
    "eagle tree": (EagleConfig(), DraftPlan((2, 2, 1))),
    "deed chain": (ExitConfig(2, 8), DraftPlan.chain(3)),
    "deed tree": (ExitConfig(1, 8), DraftPlan((2, 2, 1))),
    "uno chain": (UnoConfig(4, 4), TreePlan((1, 1, 1, 1))),
    "uno tree": (UnoConfig(3, 4), TreePlan((2, 2, 1))),
    "uno sparse": (UnoConfig(5, 4), TreePlan((1, 4, 3, 2), 9)),
    "layerskip": (ExitConfig(2), DraftPlan.chain(3)),
    "lookahead": (None, LookaheadPlan()),
    "lookahead wide": (None, LookaheadPlan(3, 12, 4, from_prompt=False)),
}


@pytest.fixture(scope="session")
def base() -> Callable[..., Decoder]:
    """A decoder of three layers, by precision."""
    made: dict[object, Decoder] = {}

    def get(dtype: torch.dtype, **changes: object) -> Decoder:
        key = (dtype, *sorted(changes.items(), key=str))
        if key not in made:
            made[key] = build(dtype, seed=3, **changes).requires_grad_(False)
        return made[key]

    return get


def noisy(weights: nn.Module, dtype: torch.dtype, noise: float = 0.1) -> nn.Module:
    """The same weights, disturbed."""
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return weights.to(dtype).requires_grad_(False)


def rival(name: str, model: Decoder, *, on: Decoder | None = None) -> Drafter:
    """One of ``RIVALS`` with random weights that begin from ``model``, to draft for it or for a packed one."""
    torch.manual_seed(5)
    config, plan = RIVALS[name]
    target = model if on is None else on
    match config:
        case MedusaConfig():
            heads = MedusaHeads(config, model.config)
            heads.start_from(model)
            return Medusa(target, noisy(heads, model.dtype, 0.02), plan)
        case EagleConfig():
            return Eagle(target, noisy(EagleLayer(config, model.config), model.dtype), plan)
        case ExitConfig():
            return exit_drafter(target, noisy(Exit(config, model.config), model.dtype), plan)
        case UnoConfig():
            return Uno(target, noisy(UnoDeltas(config, model.config), model.dtype), plan)
        case _:
            return Lookahead(target, plan)

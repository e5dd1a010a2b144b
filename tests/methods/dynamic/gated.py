"""Small gated accelerators and batches for them."""

from __future__ import annotations

import torch

from vivace.core.model import Decoder
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig
from vivace.train.data import TokenBatch

GATES = GatesConfig((GateConfig(2), GateConfig(4), GateConfig(5)))


def make_weights(
    model: Decoder,
    *,
    noise: float = 0.0,
    mode: str = "delta",
    rank: int = 4,
    bottleneck: int = 8,
    router: RouterConfig | None = None,
) -> DynamicWeights:
    """Gates at 2, 4 and 5 of six layers, untrained (``noise`` 0) or random, and an untrained router."""
    torch.manual_seed(5)
    gates = GatesConfig(GATES.gates, mode, rank, bottleneck)  # type: ignore[arg-type]
    config = DynamicConfig(gates, router or RouterConfig(latent=8, stride=1))
    made = DynamicWeights(config, model.config)
    with torch.no_grad():
        for parameter in made.gates.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    made.gates.to(model.dtype)
    return made


def text_batch(seed: int) -> TokenBatch:
    """Eight rows of 24 random tokens, the first four given."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (8, 24), generator=generator)
    return TokenBatch(tokens, torch.arange(24).expand(8, 24) >= 4)

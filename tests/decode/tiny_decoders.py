"""Tiny decoders with random weights, and random prompts for them."""

from __future__ import annotations

import torch
from torch import nn

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder

VOCAB = 97


def randomise(model: nn.Module, seed: int) -> None:
    """Weights large enough that attention is sharp and the most likely token keeps changing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.2 if parameter.dim() == 1 else 1.6 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale + (1.0 if parameter.dim() == 1 else 0.0))


def build(dtype: torch.dtype, *, vocab: int = VOCAB, seed: int = 0, **changes: object) -> Decoder:
    """A decoder like Llama's, three layers."""
    numbers: dict[str, object] = {
        "vocab_size": vocab,
        "width": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "ffn_width": 64,
        "max_positions": 512,
        "tied_head": False,
    }
    model = Decoder(ModelConfig(**(numbers | changes)))  # type: ignore[arg-type]
    randomise(model, seed)
    return model.to(dtype).eval()


def prompts(count: int, vocab: int = VOCAB, seed: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    """Random prompts of 1 to ``longest`` tokens, all different."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(1, longest + 1, (count,), generator=generator)).tolist()
    lengths[0] = 1
    return [tuple(torch.randint(0, vocab, (length,), generator=generator).tolist()) for length in lengths]

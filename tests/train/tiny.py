"""What the training tests learn, and what learns it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.train.data import Batches, Rows
from vivace.train.variation import Pair

NAMES = ("Fen House", "The Old Weir", "Marsh Inn", "Zebra", "Quayside", "Pump Room")
PAIRS: list[Pair] = [
    (f"Describe: name[{name}], area[{area}]", f"{name} is by the {area}.")
    for name in NAMES
    for area in ("river", "square", "station")
]


def tiny_decoder(dtype: torch.dtype = torch.float32, vocab: int = 400, **changes: object) -> Decoder:
    """A decoder like Llama's, two layers, with small random weights."""
    numbers: dict[str, object] = {
        "vocab_size": vocab,
        "width": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_width": 48,
        "max_positions": 256,
    }
    model = Decoder(ModelConfig(**(numbers | changes)))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.to(dtype)


def batches(tokenizer: Tokenizer, *, tokens: int = 256, seed: int = 0, pairs: Sequence[Pair] = PAIRS) -> Batches:
    """Batches of the pairs, in another order each epoch."""

    def draw(rng: random.Random, epoch: int) -> Sequence[Pair]:
        del epoch
        return rng.sample(pairs, len(pairs))

    return Batches(draw, Rows(tokenizer, 128), tokens_per_batch=tokens, seed=seed)

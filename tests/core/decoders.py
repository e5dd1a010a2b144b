"""Tiny decoders whose settings differ where bits could: windows, soft-caps, norms, experts, positions."""

from __future__ import annotations

from typing import Any

import torch

from tests.decode.tiny_decoders import randomise
from vivace.core.config import ModelConfig, MoeConfig, RopeConfig
from vivace.core.model import Decoder

VOCAB = 61

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "width": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "ffn_width": 64,
    "max_positions": 512,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"windows": (9, None, 70)},
    "softcaps": {"attention_softcap": 2.0, "logit_softcap": 5.0, "attention_scale": 0.4},
    "qk_norm": {"qk_norm": "head", "qkv_bias": True, "output_bias": True},
    "sandwich": {"norm_placement": "sandwich", "norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 6.9},
    "post_norm": {"norm_placement": "post", "qk_norm": "full", "qkv_clip": 1.5, "tied_head": False},
    "local and global": {
        **{"ropes": (RopeConfig(), RopeConfig(theta=1e6, kind="linear", factor=8.0)), "rope_of_layer": (0, 1, 0)},
        **{"windows": (9, None, 70), "norm_placement": "sandwich", "norm_offset": 1.0, "qk_norm": "head"},
        **{"num_kv_heads": 1, "activation": "gelu_tanh", "embedding_scale": 6.9},
    },
    "experts": {"moe": MoeConfig(5, 2, 20, True), "moe_layers": (True, False, True)},
    "learned": {
        **{"positions": "learned", "position_offset": 2, "norm": "layer", "gated": False, "activation": "relu"},
        **{"num_kv_heads": 4, "qkv_bias": True, "output_bias": True, "ffn_bias": True},
    },
    "dynamic": {"ropes": (RopeConfig(kind="dynamic", factor=2.0, original_positions=32, width=8),)},
}
OF_NORMS_AND_PLACES = ("dynamic", "learned", "post_norm", "qk_norm", "sandwich")
"""Those that differ from the plain one in no sum whose order could depend on other rows."""


def build(variant: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A decoder of a variant with random weights."""
    decoder = Decoder(ModelConfig(**BASE | VARIANTS[variant]))
    randomise(decoder, seed)
    return decoder.to(dtype).requires_grad_(False).eval()


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

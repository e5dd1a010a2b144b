"""A tiny random checkpoint per encoder-decoder family, its peculiarities switched on, made with transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.parity.families import VOCAB, randomise

_STACKS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
}
ENCODER_DECODERS: dict[str, tuple[type, dict[str, Any]]] = {
    "bart": (transformers.BartConfig, _STACKS),
    "mbart": (transformers.MBartConfig, _STACKS | {"scale_embedding": True}),
    "pegasus": (transformers.PegasusConfig, _STACKS | {"scale_embedding": True, "activation_function": "relu"}),
    "marian": (transformers.MarianConfig, _STACKS | {"scale_embedding": True, "activation_function": "swish"}),
    "m2m_100": (transformers.M2M100Config, _STACKS | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "t5": (transformers.T5Config, _T5),
    "t5_1.1": (transformers.T5Config, _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": (transformers.MT5Config, _T5 | {"feed_forward_proj": "gated-gelu"}),
}
"""Name -> its configuration class and the settings that make it itself."""


def make_encoder_decoder(name: str, seed: int = 0) -> nn.Module:
    """A tiny random float32 model, with eager attention."""
    kind, settings = ENCODER_DECODERS[name]
    model = transformers.AutoModelForSeq2SeqLM.from_config(kind(**settings), attn_implementation="eager")
    kept = {
        n: p.detach().clone() for n, p in model.named_parameters() if "embed_positions" in n and not p.requires_grad
    }
    randomise(model, seed)
    with torch.no_grad():
        for parameter_name, values in kept.items():
            model.get_parameter(parameter_name).copy_(values)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(0.3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)))
        for parameter_name, parameter in model.named_parameters():
            if "shared" in parameter_name or "relative_attention_bias" in parameter_name:
                parameter.mul_(3.0)
    return model.float().eval()

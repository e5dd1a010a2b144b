"""A tiny random checkpoint per family, its peculiarities switched on, made with transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 97

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 64, "rope_theta": 500.0},
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
_LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [1.2, 9.0]},
    **{"original_max_position_embeddings": 72, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
"""Texts of these tests are on either side of the length at which it changes, and none goes beyond it."""
_LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (
        transformers.LlamaConfig,
        {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5, "head_dim": 12},
    ),
    "mistral": (
        transformers.MistralConfig,
        {
            "rope_parameters": _DYNAMIC,
            "max_position_embeddings": 64,
            "sliding_window": 17,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (
        transformers.Qwen2Config,
        {"rope_parameters": _YARN, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"rope_parameters": _LINEAR, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 18},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        },
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 18},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 72,
            "sliding_window": 21,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {"rope_parameters": _YARN | {"attention_factor": 1.3, "beta_fast": 16.0}}),
    "olmoe": (
        transformers.OlmoeConfig,
        {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.8, "norm_topk_prob": False},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 19, "head_dim": 8},
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
            **{"mlp_only_layers": [1], "head_dim": 16, "rope_parameters": _LINEAR},
        },
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 56, "scale_attn_weights": False},
    ),
    "opt": (transformers.OPTConfig, {"ffn_dim": 56, "tie_word_embeddings": False}),
}
"""model_type -> its configuration class and the settings that make it itself."""

_FOREIGN = {"opt": ("intermediate_size", "num_key_value_heads"), "gpt2": tuple(_SMALL)[1:7]}
"""Settings that a family spells another way."""

_SCALED = ("gemma2", "gemma3_text")
"""Embeddings are multiplied by the root of the width; small ones keep the text from repeating itself."""


def make(family: str, seed: int = 0) -> nn.Module:
    """A tiny random float32 model of a family, with eager attention."""
    kind, settings = CONFIGS[family]
    common = {name: value for name, value in _SMALL.items() if name not in _FOREIGN.get(family, ())}
    config = kind(**{**common, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed, embedding=0.03 if family in _SCALED else 0.2)
    return model.float().eval()


def randomise(model: nn.Module, seed: int, *, embedding: float = 0.2) -> None:
    """Weights large enough that every part matters: no norm is 1, no bias is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (embedding if "embed_tokens" in name else 0.2))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.2)

"""Tiny models of every architecture as GGUF files, written by llama.cpp's conventions and not from our tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.parity.families import randomise
from vivace.checkpoint.gguf.blocks import KINDS
from vivace.checkpoint.gguf.file import Entry, Value, write_gguf

VOCAB = 96
_SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 8192, "rope_theta": 500000.0},
}
_LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)], "rope_theta": 10000.0},
    **{"long_factor": [1.2 + i for i in range(8)], "original_max_position_embeddings": 512},
}
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 18, "final_logit_softcapping": 9.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 18, "num_hidden_layers": 7},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": _LOCAL,
            },
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        {
            **{"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512, "sliding_window": 47},
            "max_position_embeddings": 1024,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
}
"""``general.architecture`` -> transformers' configuration and what is particular about the model."""

_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "input_layernorm": "attn_norm",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_BEFORE = {"post_attention_layernorm": "ffn_norm"}


def make(architecture: str) -> nn.Module:
    """A tiny random model of an architecture in float32."""
    kind, settings = CONFIGS[architecture]
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**_SMALL, **settings}), attn_implementation="eager")
    randomise(model, 3, embedding=0.05 if architecture.startswith("gemma") else 0.2)
    return model.float().eval()


def write_file(architecture: str, model: nn.Module, path: Path, kind: str = "f32", **more: Value) -> Path:
    """Write a model as llama.cpp's converter does, with a format for the matrices and more keys."""
    c: Any = model.config
    names = _NAMES | (_BEFORE if architecture in ("llama", "qwen2", "qwen3", "phi3") else _AFTER)
    names |= {"pre_feedforward_layernorm": "ffn_norm"}
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads} if architecture == "llama" else {}
    entries = []
    for name, values in model.state_dict().items():
        stem, leaf = name.rsplit(".", 1)
        if stem == "lm_head" and c.tie_word_embeddings:
            continue
        values = values + 1 if architecture.startswith("gemma") and values.dim() == 1 else values
        values = _paired(values, heads[stem[-6:]]) if stem[-6:] in heads else values
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            theirs = f"blk.{layer}.{names[rest]}.{leaf}"
        else:
            theirs = f"{names[stem]}.{leaf}"
        entries.append(_entry(theirs, values, kind if values.dim() > 1 else "f32"))
    if architecture == "llama":
        entries.append(_entry("rope_freqs.weight", _llama3_divisors(c), "f32"))
    if architecture == "phi3":
        entries.append(_entry("rope_factors_short.weight", torch.tensor(_LONGROPE["short_factor"]), "f32"))
        entries.append(_entry("rope_factors_long.weight", torch.tensor(_LONGROPE["long_factor"]), "f32"))
    write_gguf(path, {**_keys(architecture, c), "tokenizer.ggml.model": "none", **more}, entries)
    return path


def _entry(name: str, values: Tensor, kind: str) -> Entry:
    return Entry(name, tuple(values.shape), KINDS[kind], lambda: values)


def _paired(values: Tensor, heads: int) -> Tensor:
    """Rows of a head as llama.cpp rotates them: component i beside i + D/2."""
    width = len(values) // heads
    half = width // 2
    order = [head * width + part * half + pair for head in range(heads) for pair in range(half) for part in (0, 1)]
    return values[order]


def _llama3_divisors(c: Any) -> Tensor:
    """By which llama.cpp divides: the wavelength decides, as in Meta's own code."""
    divisors = []
    for pair in range(c.head_dim // 2):
        length = 2 * torch.pi * 500000.0 ** (2 * pair / c.head_dim)
        smooth = (8192 / length - 1) / 3
        divisors.append(1.0 if length < 2048 else 8.0 if length > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(divisors)


def _keys(architecture: str, c: Any) -> dict[str, Value]:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters
    rope = rope.get("full_attention", rope)
    keys: dict[str, Value] = {
        "vocab_size": VOCAB,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    if architecture in ("gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = c.sliding_window
    if architecture == "gemma2":
        keys |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": c.final_logit_softcapping}
    if architecture == "gemma3":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if architecture == "phi3":
        attention = (1 + torch.tensor(1024 / 512).log() / torch.tensor(512.0).log()).sqrt()
        keys |= {"rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": float(attention)}
    return {"general.architecture": architecture} | {f"{architecture}.{name}": value for name, value in keys.items()}

"""One translator per family, which turns the keys of a ``config.json`` into fields of ``ModelConfig``.

A translator reads every key it supports; ``Keys.finish`` then refuses the keys that are left, so that nothing that
changes the mathematics is silently ignored. ``families.py`` holds the defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.checkpoint.config_keys import Keys
from vivace.checkpoint.rope_keys import make_rope, read_rope
from vivace.core.config import Activation, MoeConfig, RopeConfig
from vivace.errors import ConfigError

Fields = dict[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Our name of each activation that a ``config.json`` may name."""


def _activation(keys: Keys, name: str, default: str) -> Activation:
    """Return the activation that a key names."""
    written = keys.take(name, default)
    if written not in ACTIVATIONS:
        raise keys.refusal(name, written, f"supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[written]


def _rotary_core(keys: Keys, *, activation: str = "hidden_act") -> Fields:
    """Return the fields that all families with rotary positions and RMS norm write in the same way."""
    width, heads = int(keys.take("hidden_size")), int(keys.take("num_attention_heads"))
    kv_is_null = "num_key_value_heads" in keys.raw and keys.written("num_key_value_heads") is None
    return {
        "vocab_size": int(keys.take("vocab_size")),
        "width": width,
        "num_layers": int(keys.take("num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": heads if kv_is_null else int(keys.take("num_key_value_heads", heads)),
        "head_dim": int(keys.take("head_dim", width // heads)),
        "ffn_width": int(keys.take("intermediate_size")),
        "max_positions": int(keys.take("max_position_embeddings")),
        "norm_eps": float(keys.take("rms_norm_eps")),
        "activation": _activation(keys, activation, "silu"),
        "tied_head": bool(keys.take("tie_word_embeddings", False)),
    }


def _with_rope(keys: Keys, fields: Fields, theta: float = 10000.0) -> Fields:
    """Add the rotary embedding that all layers share."""
    return fields | {"ropes": (read_rope(keys, fields["head_dim"], theta),)}


def _attention_bias(keys: Keys) -> Fields:
    """Return the biases of the attention projections."""
    bias = bool(keys.take("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


def _windows(keys: Keys, fields: Fields, sliding: Callable[[int], bool]) -> Fields:
    """Return the attention window of each layer, from ``layer_types``, or from the rule ``sliding`` if they are not
    listed.
    """
    types = keys.written("layer_types")
    count = fields["num_layers"]
    if types is None:
        types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(count)]
    if len(types) != count:
        raise ConfigError(f"config.json lists {len(types)} layer_types for {count} layers")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise keys.refusal("layer_types", kind, "supported: sliding_attention, full_attention")
    window = keys.written("sliding_window") or keys.take("sliding_window", None)
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise ConfigError("config.json has sliding_attention layers and no sliding_window")
    return {"windows": tuple(int(window) if kind == "sliding_attention" else None for kind in types)}


def _one_window(keys: Keys, fields: Fields) -> Fields:
    """Return the same window for all layers; null switches it off, a missing key means the family's default."""
    window = keys.written("sliding_window") if "sliding_window" in keys.raw else keys.take("sliding_window", None)
    return {} if window is None else {"windows": (int(window),) * fields["num_layers"]}


def llama(keys: Keys) -> Fields:
    """Translate Llama 2 and 3."""
    fields = _rotary_core(keys) | _attention_bias(keys)
    return _with_rope(keys, fields) | {"ffn_bias": bool(keys.take("mlp_bias", False))}


def mistral(keys: Keys) -> Fields:
    """Translate Mistral, which has an attention window in every layer."""
    fields = _rotary_core(keys)
    return _with_rope(keys, fields) | _one_window(keys, fields)


def _qwen_windows(keys: Keys, fields: Fields) -> Fields:
    """Return the windows of Qwen 2 and 3: off by default, else in the layers from ``max_window_layers`` on."""
    first = keys.take("max_window_layers")
    if not keys.take("use_sliding_window", False):
        types = keys.written("layer_types") or []
        keys.take("sliding_window", None)
        if "sliding_attention" in types:
            raise keys.refusal("layer_types", "sliding_attention", "use_sliding_window is off; set one of them right")
        return {}
    return _windows(keys, fields, lambda layer: layer >= first)


def qwen2(keys: Keys) -> Fields:
    """Translate Qwen 2 and 2.5, which have biases on queries, keys and values."""
    fields = _rotary_core(keys)
    keys.only("use_mrope", False)
    return _with_rope(keys, fields) | _qwen_windows(keys, fields) | {"qkv_bias": True}


def qwen3(keys: Keys) -> Fields:
    """Translate Qwen 3, which normalises queries and keys."""
    fields = _rotary_core(keys) | _attention_bias(keys)
    return _with_rope(keys, fields) | _qwen_windows(keys, fields) | {"qk_norm": "head"}


def _gemma(keys: Keys) -> Fields:
    """Return the fields that Gemma 2 and 3 share."""
    fields = _rotary_core(keys, activation="hidden_activation") | _attention_bias(keys)
    keys.only("use_bidirectional_attention", False)
    keys.written("hidden_act")  # old versions write it, and no version uses it
    keys.same("sliding_window", "sliding_window_size")  # the first files of Gemma 2 have both names
    return fields | {
        "norm_offset": 1.0,
        "norm_placement": "sandwich",
        "embedding_scale": fields["width"] ** 0.5,
        "attention_scale": float(keys.take("query_pre_attn_scalar")) ** -0.5,
        "attention_softcap": keys.take("attn_logit_softcapping", None),
        "logit_softcap": keys.take("final_logit_softcapping", None),
    }


def _softcaps(keys: Keys, fields: Fields) -> Fields:
    """Remove a soft-cap that is written as null; a missing key keeps the family's default."""
    written = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    off = {field: None for field, key in written.items() if key in keys.raw and keys.raw[key] is None}
    return fields | off


def gemma2(keys: Keys) -> Fields:
    """Translate Gemma 2, which has soft-caps, and windows in every other layer."""
    fields = _softcaps(keys, _gemma(keys))
    return _with_rope(keys, fields) | _windows(keys, fields, lambda layer: layer % 2 == 0)


def gemma3(keys: Keys) -> Fields:
    """Translate Gemma 3, which normalises queries and keys and has a second rotary embedding for its windowed
    layers.
    """
    fields = _softcaps(keys, _gemma(keys)) | {"qk_norm": "head"}
    keys.same("sliding_window_pattern", "_sliding_window_pattern")
    pattern = int(keys.written("sliding_window_pattern") or keys.written("_sliding_window_pattern") or 6)
    windows = _windows(keys, fields, lambda layer: (layer + 1) % pattern != 0)
    is_local = [window is not None for window in windows.get("windows", (None,) * fields["num_layers"])]
    return fields | windows | {"ropes": _gemma3_ropes(keys, fields), "rope_of_layer": tuple(map(int, is_local))}


def _gemma3_ropes(keys: Keys, fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embedding of the layers without a window, then that of the layers with one."""
    by_type = dict(keys.written("rope_parameters") or {})
    wrong = set(by_type) - {"full_attention", "sliding_attention"}
    if wrong:
        raise ConfigError(
            f"config.json: rope_parameters of a {keys.family} model are one dict per layer type, found {sorted(wrong)}"
        )
    far = {"rope_theta": keys.written("rope_theta") or 1e6, **(by_type.get("full_attention") or {})}
    far |= keys.written("rope_scaling") or {}
    near = {"rope_theta": keys.written("rope_local_base_freq") or 1e4, **(by_type.get("sliding_attention") or {})}
    return make_rope(keys, far, fields["head_dim"]), make_rope(keys, near, fields["head_dim"])


def phi3(keys: Keys) -> Fields:
    """Translate Phi-3, which has fused projections and rotates part of each head."""
    fields = _rotary_core(keys)
    fields = _with_rope(keys, fields) | _one_window(keys, fields)
    keys.written("original_max_position_embeddings")  # of the kind longrope
    kind = fields["ropes"][0].kind
    if kind not in ("default", "longrope"):
        raise keys.refusal("rope_type", kind, "phi3 models have the kinds default and longrope")
    return fields


def olmo2(keys: Keys) -> Fields:
    """Translate OLMo 2, which has norms after attention and feed-forward, and normalises queries and keys over all
    heads.
    """
    fields = _rotary_core(keys) | _attention_bias(keys)
    return _with_rope(keys, fields) | {"norm_placement": "post", "qk_norm": "full"}


def olmoe(keys: Keys) -> Fields:
    """Translate OLMoE, a mixture of experts that normalises queries and keys over all heads."""
    fields = _rotary_core(keys) | _attention_bias(keys)
    clip = keys.take("clip_qkv", None)
    return _with_rope(keys, fields) | {
        "qk_norm": "full",
        "qkv_clip": None if clip is None else float(clip),
        "moe": _experts(keys, fields["ffn_width"], bool(keys.take("norm_topk_prob"))),
    }


def _experts(keys: Keys, width: int, normalise: bool) -> MoeConfig:
    """Return the mixture's settings; files use one of two keys for the number of experts."""
    written = keys.written("num_local_experts") or keys.written("num_experts")
    count = int(written or keys.take("num_experts"))
    return MoeConfig(count, int(keys.take("num_experts_per_tok")), width, normalise)


def mixtral(keys: Keys) -> Fields:
    """Translate Mixtral, a mixture of experts."""
    fields = _rotary_core(keys)
    moe = {"moe": _experts(keys, fields["ffn_width"], True)}
    return _with_rope(keys, fields, 1e6) | _one_window(keys, fields) | moe


def qwen3_moe(keys: Keys) -> Fields:
    """Translate Qwen 3 mixtures of experts, whose layers may be dense in part."""
    fields = _rotary_core(keys) | _attention_bias(keys)
    fields = _with_rope(keys, fields) | {"qk_norm": "head"}
    keys.written("max_window_layers")  # written by old versions; every layer slides when one does
    window = {}
    if keys.take("use_sliding_window", False):
        window = {"windows": (int(keys.take("sliding_window")),) * fields["num_layers"]}
    keys.take("sliding_window", None)
    dense, every = set(keys.take("mlp_only_layers", ())), int(keys.take("decoder_sparse_step"))
    is_moe = tuple(i not in dense and (i + 1) % every == 0 for i in range(fields["num_layers"]))
    moe = _experts(keys, int(keys.take("moe_intermediate_size")), bool(keys.take("norm_topk_prob")))
    return fields | window | {"moe": moe, "moe_layers": () if all(is_moe) else is_moe}


def gpt2(keys: Keys) -> Fields:
    """Translate GPT-2, which has learned positions, layer norm and feed-forwards without a gate."""
    width, heads = int(keys.take("n_embd")), int(keys.take("n_head"))
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    scaled = bool(keys.take("scale_attn_weights", True))
    return {
        "vocab_size": int(keys.take("vocab_size")),
        "width": width,
        "num_layers": int(keys.take("n_layer")),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width // heads,
        "ffn_width": int(keys.take("n_inner", 4 * width)),
        "max_positions": int(keys.take("n_positions")),
        "norm_eps": float(keys.take("layer_norm_epsilon")),
        "activation": _activation(keys, "activation_function", "gelu_new"),
        "tied_head": bool(keys.take("tie_word_embeddings", True)),
        "attention_scale": None if scaled else 1.0,
        **_LEARNED,
        **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), True),
    }


def opt(keys: Keys) -> Fields:
    """Translate OPT, whose position embeddings start at row 2 of their table."""
    width, heads = int(keys.take("hidden_size")), int(keys.take("num_attention_heads"))
    keys.only("do_layer_norm_before", True)
    keys.only("_remove_final_layer_norm", False)
    keys.only("layer_norm_elementwise_affine", True)
    keys.only("word_embed_proj_dim", width)
    bias = bool(keys.take("enable_bias", True))
    return {
        "vocab_size": int(keys.take("vocab_size")),
        "width": width,
        "num_layers": int(keys.take("num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width // heads,
        "ffn_width": int(keys.take("ffn_dim")),
        "max_positions": int(keys.take("max_position_embeddings")),
        "norm_eps": 1e-5,
        "activation": _activation(keys, "activation_function", "relu"),
        "tied_head": bool(keys.take("tie_word_embeddings", True)),
        "position_offset": 2,
        **_LEARNED,
        **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), bias),
    }


_LEARNED: Fields = {"positions": "learned", "norm": "layer", "gated": False}
"""Fields that GPT-2 and OPT share."""

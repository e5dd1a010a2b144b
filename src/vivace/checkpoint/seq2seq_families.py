"""Encoder-decoder families: translators of their configurations, and the names of their tensors.

Both stacks are described by the same fields as any decoder. Where a family norms (before a half, or the sum), how it
counts positions and what it adds to logits are fields of ``ModelConfig``; no code depends on a family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vivace.checkpoint.config_keys import Keys
from vivace.checkpoint.names import Names
from vivace.checkpoint.translators import ACTIVATIONS, Fields
from vivace.core.config import ModelConfig, RelativeBias

_WITHOUT_EFFECT = (
    *("encoder_layerdrop", "decoder_layerdrop", "classif_dropout", "_num_labels", "save_step", "output_past"),
    *("extra_pos_embeddings", "force_bos_token_to_be_generated", "gradient_checkpointing"),
)
"""Keys that transformers does not read in these families, or only to train."""
_FAR = 1 << 15
"""Positions of a stack whose positions have no end of their own."""


def _halves(keys: Keys, **more: Any) -> Fields:
    """Return the fields of BART and its relatives: two stacks of one width over one vocabulary."""
    keys.only("is_encoder_decoder", True)
    keys.take("share_encoder_decoder_embeddings", True)
    keys.written("num_hidden_layers")  # the encoder's, once more
    for name in _WITHOUT_EFFECT:
        keys.written(name)
    width = int(keys.take("d_model"))
    shared: Fields = {
        "vocab_size": int(keys.take("vocab_size")),
        "width": width,
        "max_positions": int(keys.take("max_position_embeddings")),
        "activation": _named(keys, "activation_function", keys.take("activation_function", "gelu")),
        "embedding_scale": width**0.5 if keys.take("scale_embedding", False) else 1.0,
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), True),
        **more,
    }
    stacks = [_stack(keys, side, width) for side in ("encoder", "decoder")]
    encoder = ModelConfig(**shared, **stacks[0], is_causal=False)
    keys.only("tie_word_embeddings", True)
    return shared | stacks[1] | {"encoder": encoder, "logits_bias": True}


def _stack(keys: Keys, side: str, width: int) -> Fields:
    heads = int(keys.take(f"{side}_attention_heads"))
    return {
        "num_layers": int(keys.take(f"{side}_layers")),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width // heads,
        "ffn_width": int(keys.take(f"{side}_ffn_dim")),
    }


def _named(keys: Keys, key: str, written: str) -> Any:
    if written not in ACTIVATIONS:
        raise keys.refusal(key, written, f"supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[written]


def bart(keys: Keys) -> Fields:
    """Translate BART, which norms sums and embeddings."""
    for name in ("normalize_before", "add_final_layer_norm", "add_bias_logits", "static_position_embeddings"):
        keys.only(name, False)
    keys.only("normalize_embedding", True)
    return _halves(
        keys, norm_placement="sum", final_norm=False, embedding_norm=True, positions="learned", position_offset=2
    )


def mbart(keys: Keys) -> Fields:
    """Translate mBART, which norms before each half, and embeddings."""
    for name in ("normalize_before", "add_final_layer_norm", "normalize_embedding"):
        keys.only(name, True)
    for name in ("add_bias_logits", "static_position_embeddings"):
        keys.only(name, False)
    return _halves(keys, embedding_norm=True, positions="learned", position_offset=2)


def pegasus(keys: Keys) -> Fields:
    """Translate Pegasus, which has sinusoids for positions."""
    for name in ("normalize_before", "add_final_layer_norm", "static_position_embeddings"):
        keys.only(name, True)
    for name in ("add_bias_logits", "normalize_embedding"):
        keys.only(name, False)
    return _halves(keys, positions="sinusoid", sinusoid_span=int(keys.take("d_model")) // 2)


def marian(keys: Keys) -> Fields:
    """Translate Marian, which norms sums and has sinusoids for positions."""
    for name in ("normalize_before", "add_final_layer_norm", "add_bias_logits", "normalize_embedding"):
        keys.only(name, False)
    keys.only("static_position_embeddings", True)
    keys.only("share_encoder_decoder_embeddings", True)
    size = keys.written("decoder_vocab_size")
    if size not in (None, keys.take("vocab_size")):
        raise keys.refusal("decoder_vocab_size", size, "both sides share one vocabulary")
    span = int(keys.take("d_model")) // 2
    return _halves(keys, norm_placement="sum", final_norm=False, positions="sinusoid", sinusoid_span=span)


def m2m_100(keys: Keys) -> Fields:
    """Translate M2M-100 and NLLB, whose sinusoids begin at position 2."""
    span = int(keys.take("d_model")) // 2 - 1
    fields = _halves(keys, positions="sinusoid", sinusoid_span=span, position_offset=2)
    return fields | {"logits_bias": False}


def t5(keys: Keys) -> Fields:
    """Translate T5, Flan-T5 and mT5: relative positions, no factor on scores, RMS norms, no biases."""
    keys.only("is_encoder_decoder", True)
    for name in ("dropout_rate", "initializer_factor", "n_positions", "output_past", "relative_attention"):
        keys.written(name)
    gate, _, kind = str(keys.take("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise keys.refusal("feed_forward_proj", f"{gate}-{kind}", "supported: an activation, or gated-ACTIVATION")
    for name, value in (("is_gated_act", gate == "gated"), ("dense_act_fn", None)):
        if (written := keys.written(name)) is not None and value is not None and written != value:
            raise keys.refusal(name, written, "feed_forward_proj says otherwise")
    tied = keys.written("tie_word_embeddings")
    is_scaled = keys.written("scale_decoder_outputs")
    if keys.family == "mt5":  # transformers 5 scales what enters the head in T5 only
        is_scaled = False
    width, heads = int(keys.take("d_model")), int(keys.take("num_heads"))
    layers = int(keys.take("num_layers"))
    relative = RelativeBias(
        int(keys.take("relative_attention_num_buckets", 32)), int(keys.take("relative_attention_max_distance", 128))
    )
    shared: Fields = {
        "vocab_size": int(keys.take("vocab_size")),
        "width": width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": int(keys.take("d_kv")),
        "ffn_width": int(keys.take("d_ff")),
        "max_positions": _FAR,
        "activation": "gelu_tanh" if gate and kind == "gelu" else _named(keys, "feed_forward_proj", kind),
        "gated": bool(gate),
        "norm_eps": float(keys.take("layer_norm_epsilon", 1e-6)),
        "attention_scale": 1.0,
        "positions": "relative",
        "relative": relative,
    }
    encoder = ModelConfig(**shared, num_layers=layers, is_causal=False)
    scales = is_scaled if is_scaled is not None else tied is not False
    return shared | {
        "num_layers": int(keys.take("num_decoder_layers", layers)),
        "encoder": encoder,
        "head_scale": width**-0.5 if scales else 1.0,
    }


_ENCODER = Names(
    layer="encoder.layers.{}.",
    final_norm="encoder.layer_norm",
    attention_norm="self_attn_layer_norm",
    ffn_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
_DECODER = replace(
    _ENCODER,
    layer="decoder.layers.{}.",
    final_norm="decoder.layer_norm",
    embedding="shared",
    encoder=_ENCODER,
    cross_norm="encoder_attn_layer_norm",
    cross_q="encoder_attn.q_proj",
    cross_kv=("encoder_attn.k_proj", "encoder_attn.v_proj"),
    cross_output="encoder_attn.out_proj",
    logits_bias="final_logits_bias",
    ignored=(
        r"(model\.)?(encoder|decoder)\.embed_tokens\.weight",
        r"(model\.)?(encoder|decoder)\.embed_positions\.(weight|weights|_float_tensor)",
        r"(model\.)?(encoder|decoder)\.version",
    ),
)
_SUM = {"attention_norm": "", "attention_post_norm": "self_attn_layer_norm"} | {
    "ffn_norm": "",
    "ffn_post_norm": "final_layer_norm",
}
_LEARNED = {"positions": "{}.embed_positions", "embedding_norm": "{}.layernorm_embedding"}


def _with(names: Names, changes: dict[str, str]) -> Names:
    """Return both tables with the same changes, in which the side has a place."""
    assert names.encoder is not None
    encoder = replace(names.encoder, **{key: value.format("encoder") for key, value in changes.items()})  # type: ignore[arg-type]
    return replace(names, encoder=encoder, **{key: value.format("decoder") for key, value in changes.items()})  # type: ignore[arg-type]


M2M_100 = replace(_DECODER, logits_bias="")
PEGASUS = _DECODER
MARIAN = _with(_DECODER, _SUM)
MBART = _with(_DECODER, _LEARNED)
BART = _with(MARIAN, _LEARNED)

_T5_ENCODER = Names(
    roots=("",),
    layer="encoder.block.{}.",
    final_norm="encoder.final_layer_norm",
    attention_norm="layer.0.layer_norm",
    ffn_norm="layer.1.layer_norm",
    qkv=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    output="layer.0.SelfAttention.o",
    up=("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"),
    up_plain="layer.1.DenseReluDense.wi",
    down="layer.1.DenseReluDense.wo",
    relative="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
)
T5 = replace(
    _T5_ENCODER,
    layer="decoder.block.{}.",
    final_norm="decoder.final_layer_norm",
    embedding="shared",
    encoder=_T5_ENCODER,
    ffn_norm="layer.2.layer_norm",
    up=("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"),
    up_plain="layer.2.DenseReluDense.wi",
    down="layer.2.DenseReluDense.wo",
    relative="decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    cross_norm="layer.1.layer_norm",
    cross_q="layer.1.EncDecAttention.q",
    cross_kv=("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    cross_output="layer.1.EncDecAttention.o",
    may_untie=True,
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)

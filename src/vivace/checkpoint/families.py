"""Model families: how checkpoints of each ``model_type`` are read.

A family consists of the defaults that transformers uses for missing keys, a translator (``translators.py``) and
the table of tensor names (``names.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from vivace.checkpoint import names, seq2seq_families, translators
from vivace.checkpoint.config_keys import Keys
from vivace.checkpoint.names import Names
from vivace.checkpoint.translators import Fields
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class Family:
    """The three things needed to read checkpoints of one ``model_type``."""

    translate: Callable[[Keys], Fields]
    """Turns the keys of ``config.json`` into fields of ``ModelConfig``."""
    names: Names
    """Table of tensor names."""
    defaults: Mapping[str, Any]
    """Values that transformers assumes for keys missing from the file."""
    example: str
    """A published checkpoint that is read."""

    @property
    def has_encoder(self) -> bool:
        """Return whether its models read a source with an encoder before they write."""
        return self.translate.__module__ == seq2seq_families.__name__


_LLAMA: Fields = {"vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_MISTRAL: Fields = _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_QWEN: Fields = {
    **{"vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    **{"max_window_layers": 28, "sliding_window": 4096},
}
_QWEN3_MOE: Fields = _QWEN | {
    **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
    **{"moe_intermediate_size": 768, "decoder_sparse_step": 1},
}
_MIXTRAL: Fields = _MISTRAL | {
    **{"sliding_window": None, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2},
}
_GEMMA: Fields = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"rms_norm_eps": 1e-6, "sliding_window": 4096, "tie_word_embeddings": True},
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2: Fields = _GEMMA | {
    **{"vocab_size": 256000, "max_position_embeddings": 8192},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_GEMMA3: Fields = _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072}
_OLMO: Fields = {"vocab_size": 50304, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_OLMOE: Fields = _OLMO | {
    **{"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
}
_PHI3: Fields = {"vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_OPT: Fields = {"vocab_size": 50272, "max_position_embeddings": 2048}
_BART: Fields = {
    **{"vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024, "encoder_layers": 12},
    **{"decoder_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16},
    **{"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "activation_function": "gelu"},
}
_M2M: Fields = _BART | {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
_MARIAN: Fields = _BART | {"vocab_size": 58101}
_T5: Fields = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
_MT5: Fields = _T5 | {
    **{"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
}
_GPT2: Fields = {"vocab_size": 50257, "n_positions": 1024, "layer_norm_epsilon": 1e-5}

FAMILIES: dict[str, Family] = {
    "bart": Family(seq2seq_families.bart, seq2seq_families.BART, _BART, "facebook/bart-large-cnn"),
    "gemma2": Family(translators.gemma2, names.GEMMA, _GEMMA2, "google/gemma-2-2b-it"),
    "gemma3": Family(translators.gemma3, names.GEMMA3_MULTIMODAL, _GEMMA3, "google/gemma-3-4b-it"),
    "gemma3_text": Family(translators.gemma3, names.GEMMA3, _GEMMA3, "google/gemma-3-270m"),
    "gpt2": Family(translators.gpt2, names.GPT2, _GPT2, "openai-community/gpt2"),
    "llama": Family(translators.llama, names.LLAMA, _LLAMA, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "m2m_100": Family(seq2seq_families.m2m_100, seq2seq_families.M2M_100, _M2M, "facebook/nllb-200-distilled-600M"),
    "marian": Family(seq2seq_families.marian, seq2seq_families.MARIAN, _MARIAN, "Helsinki-NLP/opus-mt-en-de"),
    "mbart": Family(seq2seq_families.mbart, seq2seq_families.MBART, _BART, "facebook/mbart-large-50-many-to-many-mmt"),
    "mt5": Family(seq2seq_families.t5, seq2seq_families.T5, _MT5, "google/mt5-small"),
    "mistral": Family(translators.mistral, names.LLAMA, _MISTRAL, "mistralai/Mistral-7B-Instruct-v0.3"),
    "mixtral": Family(translators.mixtral, names.MIXTRAL, _MIXTRAL, "mistralai/Mixtral-8x7B-v0.1"),
    "olmo2": Family(translators.olmo2, names.OLMO2, _OLMO, "allenai/OLMo-2-1124-7B"),
    "olmoe": Family(translators.olmoe, names.OLMOE, _OLMOE, "allenai/OLMoE-1B-7B-0924"),
    "opt": Family(translators.opt, names.OPT, _OPT, "facebook/opt-1.3b"),
    "pegasus": Family(seq2seq_families.pegasus, seq2seq_families.PEGASUS, _BART, "google/pegasus-xsum"),
    "phi3": Family(translators.phi3, names.PHI3, _PHI3, "microsoft/Phi-3-mini-4k-instruct"),
    "qwen2": Family(translators.qwen2, names.LLAMA, _QWEN, "Qwen/Qwen2.5-7B-Instruct"),
    "qwen3": Family(translators.qwen3, names.QWEN3, _QWEN | {"head_dim": 128}, "Qwen/Qwen3-0.6B"),
    "qwen3_moe": Family(translators.qwen3_moe, names.QWEN3_MOE, _QWEN3_MOE, "Qwen/Qwen3-30B-A3B"),
    "t5": Family(seq2seq_families.t5, seq2seq_families.T5, _T5, "google/flan-t5-base"),
}
"""All supported families by ``model_type``."""

_OUTER = frozenset(
    {"text_config", "vision_config", "mm_tokens_per_image", *(f"{x}_token_index" for x in ("boi", "eoi", "image"))}
)
"""Keys of a multimodal file that do not concern its language model."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        UnsupportedError: its ``model_type`` is not supported.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        close = get_close_matches(str(kind), FAMILIES, n=1)
        hint = f"; the nearest is {close[0]} (such as {FAMILIES[close[0]].example})" if close else ""
        raise UnsupportedError(f"model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[kind]


def translate(raw: Mapping[str, Any], ignored: Sequence[str] = ()) -> ModelConfig:
    """Translate a Hugging Face ``config.json`` into a ``ModelConfig``.

    Args:
        raw: the parsed file.
        ignored: unknown keys that are read as if they were not there.

    Raises:
        UnsupportedError: the family is not supported, or a key that would change the mathematics.
        ConfigError: a required key is missing, numbers contradict each other, a value is of another type, or a key
            cannot be ignored.
    """
    family = family_of(raw)
    keys = Keys(_text_part(raw), family.defaults, family.example)
    try:
        fields = family.translate(keys)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]} where {raw['model_type']} needs it") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json has a value that {raw['model_type']} cannot have: {error}") from error
    keys.finish(ignored)
    return ModelConfig(**fields)


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model inside a multimodal file; any other file is returned unchanged."""
    inner = raw.get("text_config")
    if raw["model_type"] != "gemma3" or not isinstance(inner, Mapping):
        return raw
    rest = {k: v for k, v in raw.items() if k not in _OUTER and k not in inner}
    return {**rest, **inner, "model_type": raw["model_type"]}

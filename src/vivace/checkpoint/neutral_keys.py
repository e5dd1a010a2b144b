"""Keys of published configurations that no forward pass reads, each with the one value that is accepted.

A key is listed by family, with its value and where that value is known to change nothing. Every other value of it, and
the same key in another family, is refused like any unknown key: ``false`` may well switch something off that this
project computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_FAMILY = "*"


@dataclass(frozen=True)
class NeutralKey:
    """A key with a value at which it changes nothing."""

    family: str
    """``model_type``, or ``ANY_FAMILY``."""
    key: str
    value: Any
    source: str
    """Where this value is known to change nothing."""


_PHI3 = "transformers models/phi3/modeling_phi3.py: no projection has a bias"
_PHI4 = "transformers models/phi3/modeling_phi3.py does not read it; Phi-4-mini is published with it"
_OLD = "transformers 2 to 4 wrote it into every configuration; the value is its default, which switches it off"
_NANOTRON = "huggingface/nanotron src/nanotron/config/models_config.py"
_QWEN3_MOE = "transformers models/qwen3_moe/modeling_qwen3_moe.py"

NEUTRAL: tuple[NeutralKey, ...] = (
    NeutralKey(ANY_FAMILY, "pruned_heads", {}, _OLD),
    NeutralKey(ANY_FAMILY, "is_encoder_decoder", False, _OLD),
    NeutralKey(ANY_FAMILY, "add_cross_attention", False, _OLD),
    NeutralKey("llama", "is_llama_config", True, f"{_NANOTRON}: tells configuration classes apart"),
    NeutralKey("llama", "rope_interleaved", False, f"{_NANOTRON}: pairs i and i + width / 2, as transformers"),
    NeutralKey("llama", "internal_version", "7b-alpha-v2.33.0.30", "the publisher's own name of ALLaM-7B's version"),
    NeutralKey("phi3", "attention_bias", False, _PHI3),
    NeutralKey("phi3", "mlp_bias", False, _PHI3),
    NeutralKey("phi3", "lm_head_bias", False, _PHI3),
    NeutralKey("phi3", "full_attn_mod", 1, _PHI4),
    NeutralKey("phi3", "interpolate_factor", 1, _PHI4),
    NeutralKey("gpt2", "n_special", 0, "transformers 1 models: special tokens beside the vocabulary, here none"),
    NeutralKey("gpt2", "predict_special_tokens", True, "transformers 1 models: without effect where n_special is 0"),
    NeutralKey("opt", "output_projection", True, "transformers models/opt/modeling_opt.py: the head is always there"),
    NeutralKey("qwen3_moe", "qkv_bias", False, f"{_QWEN3_MOE}: biases are switched by attention_bias alone"),
    NeutralKey("qwen3_moe", "use_qk_norm", True, f"{_QWEN3_MOE}: queries and keys are always normed"),
    NeutralKey("qwen3_moe", "shared_expert_intermediate_size", 0, f"{_QWEN3_MOE}: there is no shared expert"),
)


def is_neutral(family: str, key: str, value: Any) -> bool:
    """Return whether a key of a family has the value at which it changes nothing."""
    rows = (row for row in NEUTRAL if row.key == key and row.family in (family, ANY_FAMILY))
    return any(type(value) is type(row.value) and value == row.value for row in rows)


def without(raw: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a configuration without some of its keys, in the text half of a multimodal file too."""
    kept = {key: value for key, value in raw.items() if key not in keys}
    if isinstance(kept.get("text_config"), Mapping):
        kept["text_config"] = without(kept["text_config"], keys)
    return kept

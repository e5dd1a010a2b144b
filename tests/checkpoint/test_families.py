"""Every key of a config.json is used, harmless or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from tests.parity.families import CONFIGS
from vivace.checkpoint.families import FAMILIES, translate
from vivace.core.config import RopeConfig
from vivace.errors import ConfigError, UnsupportedError

SIZES = {"hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 6, "intermediate_size": 96}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 6},
    "opt": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "ffn_dim": 96},
}


def written(family: str, **settings: object) -> dict[str, Any]:
    """The file transformers writes for a family."""
    config = CONFIGS[family][0](**settings)
    return json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_missing_keys_mean_what_transformers_assumes(family: str) -> None:
    sizes = SMALL.get(family, SIZES)
    few = {"model_type": family, **sizes}
    assert translate(few) == translate({**written(family, **sizes), "model_type": family})


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_no_key_is_passed_over(family: str) -> None:
    with pytest.raises(UnsupportedError, match=r"unknown to vivace.*new_trick = 3"):
        translate({**written(family), "new_trick": 3})


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_keys_of_old_versions_do_not_matter(family: str) -> None:
    old = {"_name_or_path": "x", "torch_dtype": "float16", "is_encoder_decoder": False, "pruned_heads": {}, "top_k": 50}
    assert translate(written(family) | old) == translate(written(family))


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba' is not supported; supported: .*llama.*qwen3_moe"):
        translate({"model_type": "mamba"})
    assert len(FAMILIES) == 14  # thirteen, and the multimodal file of one of them


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="no 'intermediate_size'"):
        translate({k: v for k, v in {"model_type": "llama", **SIZES}.items() if k != "intermediate_size"})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast for rope_type 'linear'"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("llama", {"pruned_heads": {"1": [0]}}, "pruned_heads"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, "longrope"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "use_sliding_window is off"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"activation_function": "mish"}, "activation_function"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
]


@pytest.mark.parametrize(("family", "settings", "named"), REFUSED)
def test_what_changes_the_mathematics_is_refused_by_name(family: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json") as caught:
        translate({"model_type": family, **SMALL.get(family, SIZES), **settings})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_old_and_new_spelling_of_rotary_settings() -> None:
    base = {"model_type": "llama", **SIZES, "max_position_embeddings": 4096}
    settings = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **settings}}
    new = base | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **settings}}
    assert translate(old) == translate(new)
    assert translate(new).ropes == (RopeConfig(5e5, "llama3", factor=8.0, original_positions=512),)
    older = base | {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    assert translate(older).ropes == (RopeConfig(1e4, "linear", width=4, factor=2.0),)


def test_old_spelling_of_gemma3() -> None:
    base = {"model_type": "gemma3_text", **SIZES}
    old = base | {
        **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        **{"sliding_window_pattern": 3, "sliding_window": 512},
    }
    far, near = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 1e4, "rope_type": "default"}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    new = base | {"rope_parameters": {"full_attention": far, "sliding_attention": near}, "sliding_window": 512}
    assert translate(old) == translate(new | {"layer_types": kinds})
    assert translate(old).windows == (512, 512, None) * 2


def test_the_text_half_of_a_multimodal_file() -> None:
    text = written("gemma3_text", **SIZES)
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"a": 1}, "mm_tokens_per_image": 256}
    assert translate(whole) == translate(text)


@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_yarn_matches_transformers(attention_factor: float | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for extra in ({}, {"mscale": 1.0, "mscale_all_dim": 0.8}, {"beta_fast": 20.0, "truncate": False}):
        given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
        given |= extra | ({} if attention_factor is None else {"attention_factor": attention_factor})
        config = transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=given)
        _, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        rope = translate(json.loads(config.to_json_string())).ropes[0]
        assert rope.attention_factor == pytest.approx(scale)


def test_null_switches_off_and_absence_means_the_default() -> None:
    base = {"model_type": "mistral", **SIZES}
    assert translate(base).windows == (4096,) * 6
    assert translate(base | {"sliding_window": None}).windows == ()
    gemma = {"model_type": "gemma2", **SIZES}
    assert translate(gemma).logit_softcap == 30.0
    assert translate(gemma | {"final_logit_softcapping": None}).logit_softcap is None
    assert translate(base | {"num_key_value_heads": None}).num_kv_heads == 32

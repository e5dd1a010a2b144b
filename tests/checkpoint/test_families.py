"""Every key of a config.json is used, harmless or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from tests.parity.families import CONFIGS
from vivace.checkpoint.families import FAMILIES, translate
from vivace.checkpoint.neutral_keys import ANY_FAMILY, NEUTRAL
from vivace.core.config import RopeConfig
from vivace.core.rope import frequencies
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
    assert len(FAMILIES) == 21  # fourteen decoders, two of them in files of one family, and seven with an encoder


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="no 'intermediate_size'"):
        translate({k: v for k, v in {"model_type": "llama", **SIZES}.items() if k != "intermediate_size"})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'"),
    ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type = 'su'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast for rope_type 'linear'"),
    ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ("llama", {"pruned_heads": {"1": [0]}}, "pruned_heads"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}}, "new for rope_type 'linear'"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    ("phi3", {"attention_bias": True}, "attention_bias = True"),
    ("llama", {"use_rope": False}, "--ignore-config-key use_rope"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
    ("mistral", {"rope_interleaved": False}, "rope_interleaved = False"),
    ("gpt2", {"n_special": False}, "n_special = False"),
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "has no low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None, "high_freq_factor": 4.0}},
            "cannot have",
        ),
        ({"rope_scaling": "yarn"}, "cannot have"),
        ({"rope_parameters": [1]}, "cannot have"),
        ({"hidden_act": ["silu"]}, "cannot have"),
        ({"num_attention_heads": 0}, "cannot have"),
        ({"max_position_embeddings": "many"}, "cannot have"),
    ],
)
def test_values_that_no_model_has(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        translate({"model_type": "llama", **SIZES, **settings})
    assert str(caught.value).startswith("config.json has ")


@pytest.mark.parametrize("factor", [0.4, 1.5, 0.0])
def test_parts_of_a_head_that_cannot_be_rotated(factor: float) -> None:
    sizes = SIZES | {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ConfigError, match="of 12 components of a head cannot be rotated; check partial_rotary_factor"):
        translate({"model_type": "llama", **sizes, "head_dim": 12, "partial_rotary_factor": factor + 0.02})


@pytest.mark.parametrize("chosen", [0, 9])
def test_experts_that_cannot_be_chosen(chosen: int) -> None:
    raw = written("mixtral") | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": chosen}
    with pytest.raises(ConfigError, match=f"{chosen} of 8 experts cannot be chosen"):
        translate(raw)


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


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.0, 2.0, 8.0, 32.0]}


def longrope(**settings: object) -> RopeConfig:
    base = {"model_type": "phi3", **SIZES, "max_position_embeddings": 512, "original_max_position_embeddings": 64}
    return translate(base | {"rope_scaling": LONGROPE | settings}).ropes[0]


def test_longrope_matches_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"max_position_embeddings": 512, "original_max_position_embeddings": 64, "pad_token_id": 0}
    config = transformers.Phi3Config(**SIZES, **settings, rope_scaling=dict(LONGROPE))
    short, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=65)
    rope = longrope()
    assert rope.attention_factor == pytest.approx(scale)
    assert rope.original_positions == 64
    torch.testing.assert_close(frequencies(rope, 8), short)
    torch.testing.assert_close(frequencies(replace(rope, short_factors=rope.long_factors), 8), long)
    assert longrope(attention_factor=1.5).attention_factor == 1.5
    assert longrope(type="su") == longrope(type="yarn") == rope


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_needs_a_divisor_for_every_pair(name: str) -> None:
    for wrong, found in (([1.0] * 3, "3"), (None, "None")):
        with pytest.raises(ConfigError, match=f"needs 4 of {name}, found {found}"):
            longrope(**{name: wrong})


def test_an_unknown_key_may_be_ignored_by_name() -> None:
    base = {"model_type": "llama", **SIZES}
    assert translate(base | {"use_rope": False}, ["use_rope"]) == translate(base)
    with pytest.raises(
        UnsupportedError, match=r"= 1; .*such as .*SmolLM2.*; --ignore-config-key trick reads"
    ) as caught:
        translate(base | {"use_rope": False, "trick": 1}, ["use_rope"])
    assert "use_rope" not in str(caught.value)
    with pytest.raises(ConfigError, match="hidden_size is a setting that llama models use"):
        translate(base, ["hidden_size"])
    with pytest.raises(ConfigError, match=r"no key 'use_ropes' to ignore; did you mean 'use_rope'"):
        translate(base | {"use_rope": False}, ["use_ropes"])


def test_a_neutral_key_has_one_value_in_one_family() -> None:
    for row in NEUTRAL:
        decoders = [name for name, family in FAMILIES.items() if family.names.encoder is None]
        for family in decoders if row.family == ANY_FAMILY else [row.family]:
            raw = written("gemma3_text" if family == "gemma3" else family) | {"model_type": family}
            assert translate(raw | {row.key: row.value}) == translate(raw), row
            others = (7, "x", [1], None, 1 if row.value is True else 0 if row.value is False else False)
            for other in [] if row.key == "add_cross_attention" else others:
                with pytest.raises(UnsupportedError, match=f"{row.key} = "):
                    translate(raw | {row.key: other})


def test_the_second_name_of_a_setting_has_its_value() -> None:
    gemma = {"model_type": "gemma2", **SIZES}
    assert translate(gemma | {"sliding_window": 9, "sliding_window_size": 9}).windows[0] == 9
    with pytest.raises(ConfigError, match="sliding_window_size = 9, another name of sliding_window, which is 4096"):
        translate(gemma | {"sliding_window_size": 9})


@pytest.mark.parametrize(("asked", "found"), [("gemma", "gemma3"), ("qwen2_moe", "qwen3_moe"), ("phi", "phi3")])
def test_the_nearest_family_is_named(asked: str, found: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"; the nearest is {found} \(such as .*/"):
        translate({"model_type": asked})

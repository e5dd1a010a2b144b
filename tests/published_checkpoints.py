"""Configurations as publishers ship them, and tiny ones that differ from them in nothing but sizes.

``checkpoint/published.json`` holds facts: for each checkpoint its name, its family, where its ``config.json`` was
found, and every key with its value. There are no weights and no texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "checkpoint" / "published.json"
VOCAB = 97
HEAD = 8
"""Width of a head; wide enough for three quarters of it to be pairs."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "boi_token_index", "eoi_token_index", "image_token_index")
TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass(frozen=True)
class Published:
    """One checkpoint of a publisher."""

    name: str
    """On the Hub."""
    family: str
    source: str
    """Public file that quotes its ``config.json``."""
    config: dict[str, Any]


@cache
def published() -> tuple[Published, ...]:
    """Return all of them, by family and name."""
    return tuple(Published(**row) for row in json.loads(FACTS.read_text(encoding="utf-8")))


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with every key of another one, but with small sizes.

    Widths keep their proportions, and query heads their number for each key/value head. Layers that are listed by kind
    are the first seven, so that a kind that is in every sixth layer is among them.
    """
    small = {key: _id(value) if key in IDS else value for key, value in config.items()}
    if "text_config" in config:
        small["text_config"] = shrunk(config["text_config"])
        small["vision_config"] = config["vision_config"] | TINY_VISION | {"image_size": 28, "patch_size": 14}
        return small
    spelling = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    spelt = {name: spelling[name] if config["model_type"] == "gpt2" else name for name in spelling}
    heads, width = config[spelt["num_attention_heads"]], config[spelt["hidden_size"]]
    kv_heads = config.get("num_key_value_heads", heads)
    few_kv = min(kv_heads, 2)
    few = few_kv * heads // kv_heads
    wide = few * HEAD * width / (heads * config.get("head_dim", width // heads))
    tiny = 2 * few * round(wide / (2 * few)) or 2 * few  # transformers asks Gemma 3 for a multiple of the heads
    sizes = {
        spelt["hidden_size"]: tiny,
        spelt["num_attention_heads"]: few,
        spelt["num_hidden_layers"]: 7 if {"layer_types", "sliding_window_pattern"} & set(config) else 2,
        **{"num_key_value_heads": few_kv, "head_dim": HEAD, "vocab_size": VOCAB},
        "word_embed_proj_dim": tiny * config.get("word_embed_proj_dim", width) // width,
        "num_experts": min(config.get("num_experts", 0), 8),
        "num_experts_per_tok": min(config.get("num_experts_per_tok", 0), 3),
    }
    for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim"):
        sizes[name] = max(4, round(config.get(name, 0) / width * tiny))
    if "layer_types" in config:
        sizes["layer_types"] = config["layer_types"][:7]
    if "long_factor" in (config.get("rope_scaling") or {}):
        pairs = int(HEAD * config.get("partial_rotary_factor", 1.0)) // 2
        scaling = config["rope_scaling"]
        few_factors = {name: _spread(scaling[name], pairs) for name in ("short_factor", "long_factor")}
        sizes["rope_scaling"] = scaling | few_factors
    return small | {name: size for name, size in sizes.items() if name in config}


def _id(value: Any) -> Any:
    """Return a token id, or several, that a small vocabulary has."""
    if isinstance(value, list):
        return [_id(one) for one in value]
    return value if value is None else value % VOCAB


def _spread(values: list[float], count: int) -> list[float]:
    """Return so many of the values, the first and the last among them."""
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]

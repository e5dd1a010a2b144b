"""Initial weights of a decoder, and more layers for a trained one without a change of its function.

Matrices are initialised from a normal distribution of small variance, except the two of each layer that write to the
residual, which are zero: every layer starts as the identity (as in Goyal et al. 2017, arXiv:1706.02677, for residual
blocks). **Ours**: initial embeddings depend on the spelling of the tokens, so that ``The``, `` The`` and ``THE`` are
near each other before the first step, which a model needs in order to copy names.

Growing in depth (progressive stacking, Gong et al. 2019): most of what a small model learns first needs few layers, and
a third of the layers costs a third of the time. Layers that are added between start as the identity, so the function is
the same before and after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vivace.checkpoint.bpe import spelling
from vivace.checkpoint.families import translate
from vivace.core.config import ModelConfig
from vivace.core.layers import FeedForward, RMSNorm
from vivace.core.model import Decoder, Layer
from vivace.errors import ConfigError

_CASE_SHARE = 0.35
_PREFIX_SHARE = 0.35
_OWN_SHARE = 0.25


@dataclass(frozen=True)
class ShapeConfig:
    """Shape of a Llama decoder with tied embeddings."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError(f"shape.{name} must be positive, found {value}")

    def hf_config(self) -> dict[str, Any]:
        """Return the ``config.json`` of this decoder, with the special tokens' ids that ``checkpoint/bpe.py`` gives."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 3,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn_width,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


def start_decoder(shape: ShapeConfig, depth: int, pieces: Mapping[int, str], seed: int) -> Decoder:
    """Make a decoder with initial weights.

    Args:
        shape: shape of the finished decoder.
        depth: number of layers it has at first, at most those of the shape.
        pieces: spelling of each token by id, as ``Tokenizer.pieces`` returns it; ids without one are allowed.
        seed: seed of the weights.
    """
    spelled = [pieces.get(index, "") for index in range(shape.vocab_size)]
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(at_depth(translate(shape.hf_config()), depth))
    with torch.no_grad():
        model.embedding.copy_(spelled_embeddings(spelled, shape.width, generator))
        _ones(model.final_norm)
        for layer in model.layers:
            assert isinstance(layer, Layer)
            _start(layer, generator)
    return model


@torch.no_grad()
def deepen(model: Decoder, depth: int, places: Sequence[int], seed: int) -> Decoder:
    """Return a decoder with more layers that computes the same function.

    Args:
        model: decoder with ``len(places)`` layers.
        depth: number of layers of the new decoder.
        places: rising indices that the layers of ``model`` get in the new decoder.
        seed: seed of the new layers' matrices that read the residual; those that write to it are zero.

    Raises:
        ConfigError: the places are not as many as the layers, do not rise, or lie outside ``depth``.
    """
    count = model.config.num_layers
    if len(places) != count or sorted(set(places)) != list(places) or not (places and places[0] >= 0):
        raise ConfigError(f"{count} layers need {count} rising places, found {list(places)}")
    if places[-1] >= depth:
        raise ConfigError(f"a place of {places[-1]} is outside {depth} layers")
    generator = torch.Generator().manual_seed(seed)
    grown = Decoder(at_depth(model.config, depth)).to(model.dtype)
    grown.embedding.copy_(model.embedding)
    grown.final_norm.load_state_dict(model.final_norm.state_dict())
    known = dict(zip(places, model.layers, strict=True))
    for index, layer in enumerate(grown.layers):
        assert isinstance(layer, Layer)
        if index in known:
            layer.load_state_dict(known[index].state_dict())
        else:
            _start(layer, generator)
    return grown


def at_depth(config: ModelConfig, depth: int) -> ModelConfig:
    """Return the configuration with another number of layers."""
    return replace(config, num_layers=depth)


def spelled_embeddings(pieces: Sequence[str], width: int, generator: torch.Generator) -> Tensor:
    """Return embeddings (V, E) in which tokens of the same letters are near each other; standard deviation 0.05."""
    known: dict[tuple[str, str], Tensor] = {}

    def vector(kind: str, name: str) -> Tensor:
        if (kind, name) not in known:
            known[kind, name] = torch.randn(width, generator=generator)
        return known[kind, name]

    rows = torch.randn(len(pieces), width, generator=generator) * _OWN_SHARE
    for index, piece in enumerate(pieces):
        prefix, letters, case = spelling(piece)
        rows[index] += vector("letters", letters)
        rows[index] += _CASE_SHARE * vector("case", case) + _PREFIX_SHARE * vector("prefix", prefix)
    return rows * (0.05 / rows.std())


def _start(layer: Layer, generator: torch.Generator) -> None:
    """Set norms to one, matrices that read the residual to normal numbers, those that write to it to zero."""
    feed = layer.feed_forward
    assert isinstance(feed, FeedForward)
    for reading in (layer.qkv.weight, feed.up.weight):
        assert isinstance(reading, Tensor)
        reading.copy_(torch.randn(reading.shape, generator=generator) * (0.5 / math.sqrt(reading.shape[1])))
    for writing in (layer.o.weight, feed.down.weight):
        assert isinstance(writing, Tensor)
        writing.zero_()
    for norm in (layer.attention_norm, layer.ffn_norm):
        _ones(norm)


def _ones(norm: nn.Module | None) -> None:
    assert isinstance(norm, RMSNorm)
    norm.weight.fill_(1.0)

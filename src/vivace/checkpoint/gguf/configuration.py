"""The metadata of a GGUF file as the ``config.json`` of a Hugging Face checkpoint.

Every key of the architecture is read, or known to change nothing here (``_NEUTRAL``), or refused by name, as
``config_keys.py`` does it for ``config.json``. What the format leaves out because llama.cpp knows it by architecture
(windows of Gemma, its rotary embedding of windowed layers) is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivace.checkpoint.gguf.header import Header
from vivace.core.config import RopeConfig
from vivace.core.rope import frequencies
from vivace.errors import CorruptError, UnsupportedError

Fields = dict[str, Any]

_NEUTRAL = frozenset({"rope.scaling.finetuned", "attention.causal", "tensor_data_layout", "rope.dimension_count_swa"})
"""Keys of an architecture that change no number of a forward pass here."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the configuration: divisors of the rotary frequencies."""


class Metadata:
    """The keys of a file's architecture, with a record of which have been read."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.architecture = str(header.keys.get("general.architecture"))
        self._prefix = f"{self.architecture}."
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if there is none; floats as the shortest decimal number that is
        the same float32.

        Raises:
            CorruptError: there is none, and no default.
            UnsupportedError: layers differ in it.
        """
        self._read.add(name)
        value = self._header.keys.get(self._prefix + name)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"{self._header.path}: {self._prefix}{name} differs between layers: {value[:8]}")
            value = value[0]
        if value is None:
            if default is None:
                raise CorruptError(f"{self._header.path} has no key {self._prefix}{name}; the file is incomplete")
            return default
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def find(self, name: str) -> Any:
        """Return the value of a key, None if there is none."""
        return self.take(name) if self._prefix + name in self._header.keys else None

    def rows(self, tensor: str) -> int:
        """Return the number of rows of a tensor.

        Raises:
            CorruptError: there is no such tensor.
        """
        if tensor not in self._header.tensors:
            raise CorruptError(f"{self._header.path} has no tensor {tensor}; the file is incomplete")
        return self._header.tensors[tensor].shape[0]

    def has(self, tensor: str) -> bool:
        """Return whether the file holds a tensor."""
        return tensor in self._header.tensors

    def finish(self) -> None:
        """Refuse every key of the architecture that has not been read.

        Raises:
            UnsupportedError: there is one.
        """
        mine = {k.removeprefix(self._prefix): v for k, v in self._header.keys.items() if k.startswith(self._prefix)}
        rest = {name: value for name, value in mine.items() if name not in self._read | _NEUTRAL}
        if rest:
            listed = ", ".join(f"{self._prefix}{name} = {str(value)[:60]}" for name, value in sorted(rest.items()))
            raise UnsupportedError(
                f"{self._header.path} has keys unknown to vivace, which may change the mathematics: {listed}"
            )


@dataclass(frozen=True)
class Architecture:
    """How files of one ``general.architecture`` are read."""

    model_type: str
    """``model_type`` of the same model in a ``config.json``."""
    more: Callable[[Metadata, Fields], Fields] = lambda keys, fields: {}
    """Returns the fields that only this architecture has."""
    interleaves: bool = False
    """Whether rows of queries and keys are in llama.cpp's order, in which rotated pairs are neighbours."""
    norm_offset: float = 0.0
    """What has been added to the weights of the norms."""
    activation: str = "hidden_act"
    """Key of the activation in ``config.json``."""
    ropes: tuple[str, ...] = ("none", "linear", "yarn")
    """Kinds of stretched rotary positions that are read."""


def _biases(keys: Metadata, fields: Fields) -> Fields:
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


def _attention_bias(keys: Metadata, fields: Fields) -> Fields:
    return {"attention_bias": keys.has("blk.0.attn_q.bias")}


def _gemma2(keys: Metadata, fields: Fields) -> Fields:
    count = fields["num_hidden_layers"]
    return {
        **_scale(keys, fields, largest=46),
        "sliding_window": keys.take("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(count)],
        "attn_logit_softcapping": keys.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Metadata, fields: Fields) -> Fields:
    count, pattern = fields["num_hidden_layers"], keys.take("attention.sliding_window_pattern", 6)
    near = keys.take("rope.freq_base_swa", 10000.0)
    far: Fields = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")} | (fields.pop("rope_scaling") or {})
    return {
        **_scale(keys, fields, largest=62),
        "sliding_window": keys.take("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)],
        "attn_logit_softcapping": keys.find("attn_logit_softcapping"),
        "final_logit_softcapping": keys.find("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": far,
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
    }


def _scale(keys: Metadata, fields: Fields, largest: int) -> Fields:
    """Return Gemma's scale of queries: that of a head's width, and in its 27B models that of the width divided by the
    number of heads; these are told by their number of layers, as in llama.cpp.
    """
    is_largest = fields["num_hidden_layers"] == largest
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_largest else fields["head_dim"]
    return {"query_pre_attn_scalar": scalar}


def _phi3(keys: Metadata, fields: Fields) -> Fields:
    return {"sliding_window": keys.find("attention.sliding_window") or None}


_GEMMA: Fields = {"norm_offset": 1.0, "activation": "hidden_activation"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _biases, interleaves=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _attention_bias),
    "gemma2": Architecture("gemma2", _gemma2, **_GEMMA),
    "gemma3": Architecture("gemma3_text", _gemma3, ropes=("none", "linear"), **_GEMMA),
    "phi3": Architecture("phi3", _phi3, ropes=("none", "longrope")),
    "olmo2": Architecture("olmo2", _attention_bias),
}
"""All architectures that are read, by name."""


def find_architecture(header: Header) -> Architecture:
    """Return how the files of this architecture are read.

    Raises:
        UnsupportedError: they are not.
    """
    name = str(header.keys.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path} is a GGUF file of the architecture {name!r}; read are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def configuration(header: Header, read: Callable[[str], Tensor]) -> Fields:
    """Return the ``config.json`` of a file.

    Args:
        header: its header.
        read: returns the values of one of ``ROPE_TENSORS``.

    Raises:
        UnsupportedError: the architecture or a setting is not read.
        CorruptError: a key is missing.
    """
    architecture, keys = find_architecture(header), Metadata(header)
    for name in ("expert_count", "expert_used_count"):
        if keys.take(name, 0):
            raise UnsupportedError(
                f"{header.path} is a mixture of {keys.take(name)} experts; of GGUF files, dense models are read"
            )
    width, heads = keys.take("embedding_length"), keys.take("attention.head_count")
    head_dim = keys.take("attention.key_length", width // heads)
    if keys.take("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{header.path} has values of another width than keys, which is not supported")
    keys.find("vocab_size")  # that of the embedding applies
    fields: Fields = {
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": width,
        "intermediate_size": keys.take("feed_forward_length"),
        "num_hidden_layers": keys.take("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.take("context_length"),
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon"),
        architecture.activation: "gelu_pytorch_tanh" if architecture.norm_offset else "silu",
        "tie_word_embeddings": not keys.has("output.weight"),
        "rope_theta": keys.take("rope.freq_base", 10000.0),
    }
    fields |= _special_ids(header)
    fields |= _rope(header, keys, architecture, fields, read)
    fields |= architecture.more(keys, fields)
    keys.finish()
    return fields


def _dtype(header: Header) -> str:
    """Return the dtype in which matrices are computed: that of whole numbers, bfloat16 for blocks of codes."""
    types = {entry.type for entry in header.tensors.values() if len(entry.shape) > 1}
    if types <= {"f32"}:
        return "float32"
    return "float16" if types <= {"f32", "f16"} else "bfloat16"


def _special_ids(header: Header) -> Fields:
    """Return the ids of special tokens."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {ours: header.keys.get(f"tokenizer.ggml.{theirs}") for ours, theirs in names.items()}
    return {ours: index for ours, index in found.items() if index is not None}


def _rope(
    header: Header, keys: Metadata, architecture: Architecture, fields: Fields, read: Callable[[str], Tensor]
) -> Fields:
    """Return the settings of rotary positions beside their base."""
    head_dim, length = fields["head_dim"], fields["max_position_embeddings"]
    rotated = keys.take("rope.dimension_count", head_dim)
    partial: Fields = {}
    if rotated != head_dim:
        if architecture.model_type != "phi3":
            raise UnsupportedError(
                f"{header.path} rotates {rotated} of {head_dim} components of a head; that is read for phi3"
            )
        partial = {"partial_rotary_factor": rotated / head_dim}
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", 1.0)
    original = keys.take("rope.scaling.original_context_length", length)
    attention = keys.find("rope.scaling.attn_factor")
    if keys.take("rope.scale_linear", 1.0) != 1.0:  # the older spelling
        kind, factor = "linear", keys.take("rope.scale_linear")
    if keys.has(ROPE_TENSORS[1]) or keys.has(ROPE_TENSORS[2]):
        kind = "longrope"
    if kind not in architecture.ropes:
        raise UnsupportedError(
            f"{header.path}: {keys.architecture}.rope.scaling.type = {kind!r} is not supported; "
            f"supported: {', '.join(architecture.ropes)}"
        )
    scaling: Fields | None = None
    if kind == "longrope":
        short, long = (read(name).tolist() for name in ROPE_TENSORS[1:])
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        scaling |= {"original_max_position_embeddings": original}
        scaling |= {} if attention is None else {"attention_factor": attention}
        partial |= {"original_max_position_embeddings": original}
    elif attention not in (None, 1.0):
        raise UnsupportedError(f"{header.path}: rope.scaling.attn_factor = {attention} is read for longrope only")
    elif kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if keys.has(ROPE_TENSORS[0]):
        if scaling is not None:
            raise UnsupportedError(
                f"{header.path} stretches rotary positions twice: by {kind} and by {ROPE_TENSORS[0]}"
            )
        scaling = _divided(read(ROPE_TENSORS[0]).double(), fields["rope_theta"], head_dim, length)
    return {"rope_scaling": scaling, **partial}


def _divided(divisors: Tensor, theta: float, head_dim: int, length: int) -> Fields | None:
    """Return the settings that divide rotary frequencies like this: those of Llama 3 or of linear scaling if they do,
    else the divisors themselves.
    """
    if len(divisors) != head_dim // 2 or not bool((torch.isfinite(divisors) & (divisors > 0)).all()):
        raise CorruptError(f"{ROPE_TENSORS[0]} does not hold {head_dim // 2} positive divisors; the file is damaged")
    factor = float(divisors.max())
    if float(divisors.min()) == factor:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    plain = RopeConfig(theta=theta)
    bends: Fields = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stretched = RopeConfig(theta, "llama3", None, original_positions=8192, **bends)  # as in every published Llama 3
    if torch.allclose(frequencies(plain, head_dim).double() / frequencies(stretched, head_dim), divisors, rtol=1e-5):
        return {"rope_type": "llama3", "original_max_position_embeddings": 8192, **bends}
    values = divisors.tolist()
    given = {"short_factor": values, "long_factor": values, "original_max_position_embeddings": length}
    return {"rope_type": "longrope", "attention_factor": 1.0, **given}

"""The architecture of a decoder as numbers that its mathematics uses, without the names of model families.

A model family is supported by translating its ``config.json`` into these fields (``checkpoint/families.py``); ``core``
does not depend on the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vivace.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding: its base frequencies and their scaling to longer texts (formulas in ``core/rope.py``)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    width: int | None = None
    """Number of leading components of a head that are rotated; None rotates all D."""
    factor: float = 1.0
    original_positions: int = 0
    """Length that the model was trained for before scaling (dynamic, llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Factor on cosine and sine (yarn, longrope)."""
    truncate: bool = True
    """Whether yarn's correction range is rounded to whole components."""
    short_factors: tuple[float, ...] = ()
    """Divisor of each frequency in texts of up to ``original_positions`` tokens (longrope)."""
    long_factors: tuple[float, ...] = ()
    """Divisor of each frequency in longer texts (longrope)."""

    @property
    def depends_on_length(self) -> bool:
        """Return whether a row's rotation depends on the length of its text, and not only on its position."""
        return self.kind in ("dynamic", "longrope")

    def length_class(self, length: int) -> int:
        """Return a number that two lengths share exactly where prompts of these lengths are rotated alike."""
        if self.kind == "dynamic":
            return max(length, self.original_positions)
        return int(self.kind == "longrope" and length > self.original_positions)


@dataclass(frozen=True)
class MoeConfig:
    """Routing of a mixture-of-experts feed-forward."""

    num_experts: int
    top_k: int
    expert_width: int
    normalise: bool
    """Whether the probabilities of the chosen experts are scaled to sum to one."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"{self.top_k} of {self.num_experts} experts cannot be chosen; check num_experts_per_tok and the "
                "number of experts"
            )


@dataclass(frozen=True)
class RelativeBias:
    """What attention adds to scores for the distance between two positions, one number for each head (T5)."""

    num_buckets: int = 32
    """Distances that are told apart."""
    max_distance: int = 128
    """All larger distances are one."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a transformer: a decoder, or with ``is_causal=False`` an encoder."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    max_positions: int
    activation: Activation = "silu"
    gated: bool = True
    """Whether the feed-forward is ``down(act(gate(x)) * up(x))`` instead of ``down(act(up(x)))``."""

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores weight - 1)."""
    norm_placement: Literal["pre", "post", "sandwich", "sum"] = "pre"
    """Whether each half of a layer has a norm before it, after it (OLMo 2), both (Gemma 2 and 3), or of the sum of
    residual and half (BART)."""
    final_norm: bool = True
    """Whether there is a norm after the last layer."""
    embedding_norm: bool = False
    """Whether embeddings are normed when positions have been added (BART)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of queries and keys before the rotation: for each head, or over all heads at once."""
    qkv_clip: float | None = None
    """Queries, keys and values are clamped to [-clip, clip] after the QK-norm, before the rotation (OLMoE)."""

    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False

    attention_scale: float | None = None
    """Factor on q.k; None means 1/sqrt(D)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_head: bool = True
    head_scale: float = 1.0
    """Factor on what enters the head (T5)."""
    logits_bias: bool = False
    """Whether a number is added to the logit of each token, also where the head is the embedding (BART)."""

    positions: Literal["rotary", "learned", "sinusoid", "relative"] = "rotary"
    position_offset: int = 0
    """Row of the position table for the first token (OPT: 2)."""
    sinusoid_span: int = 1
    """Frequency i of sinusoids is ``10000 ** (-i / span)``."""
    relative: RelativeBias | None = None
    """Of positions "relative"; one table for all layers."""
    is_causal: bool = True
    """Whether a row reads the positions up to its own; otherwise whole texts are read at once."""
    encoder: ModelConfig | None = None
    """Architecture of the encoder whose output every layer reads too; None for decoders without one."""
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    rope_of_layer: tuple[int, ...] = ()
    """Index into ``ropes`` for each layer; empty means 0 for every layer."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer (a row reads its own and the window - 1 positions before); empty means none."""
    moe: MoeConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    """Which layers are mixtures of experts; empty means all if ``moe`` is set."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly; "
                "check num_attention_heads and num_key_value_heads"
            )
        for name in ("rope_of_layer", "windows", "moe_layers"):
            given = getattr(self, name)
            if given and len(given) != self.num_layers:
                raise ConfigError(f"{name} has {len(given)} entries for {self.num_layers} layers")
        if self.head_dim % 2 and self.positions == "rotary":
            raise ConfigError(f"rotary positions need an even head width, found {self.head_dim}")
        for rope in self.ropes:
            if rope.width is not None and (rope.width % 2 or not 0 < rope.width <= self.head_dim):
                raise ConfigError(
                    f"{rope.width} of {self.head_dim} components of a head cannot be rotated; check "
                    "partial_rotary_factor"
                )

    @property
    def group(self) -> int:
        """Number of query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor on q.k in attention."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def certain_logit(self) -> float | None:
        """Logits of a size below this stay in order when they are capped; None where they are not capped.

        ``c tanh(x / c)`` rises everywhere, but not in float32: from about 9 c on it is c. Up to 4 c two neighbouring
        bfloat16 numbers become numbers that differ by more than a hundred roundings.
        """
        return None if self.logit_softcap is None else 4 * self.logit_softcap

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None when its rows read everything."""
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        return self.ropes[self.rope_of_layer[layer] if self.rope_of_layer else 0]

    def room(self, num_prompt_tokens: int) -> int:
        """Return the number of positions that a text may have whose prompt has so many tokens.

        The kind longrope rotates texts beyond a length in another way from their first token on. A text that begins
        below that length therefore ends there: entries that are stored already would not fit those after them.
        """
        turns = [rope.original_positions for rope in self.ropes if rope.kind == "longrope"]
        return min([self.max_positions, *(turn for turn in turns if num_prompt_tokens <= turn)])

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer's feed-forward is a mixture of experts."""
        return self.moe is not None and (not self.moe_layers or self.moe_layers[layer])

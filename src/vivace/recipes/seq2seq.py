"""Recipe for training encoder-decoder models on pairs of a source and its text: summaries, translations, descriptions.

The same recipe trains a T5 from scratch, with a tokenizer learnt from the data, or goes on from any encoder-decoder
checkpoint that the engine reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vivace.errors import ConfigError
from vivace.train.config import LoopConfig
from vivace.train.denoising import DenoisingConfig
from vivace.train.optim import OptimiserConfig
from vivace.train.variation import VariationConfig


@dataclass(frozen=True)
class T5Shape:
    """Shape of a T5 whose embedding is its head, with gated feed-forwards (T5 1.1, Shazeer 2020, arXiv:2002.05202)."""

    num_layers: int
    """Layers of the encoder."""
    num_decoder_layers: int
    width: int
    ffn_width: int
    num_heads: int
    head_dim: int
    vocab_size: int = 4096
    num_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError(f"shape.{name} must be positive, found {value}")

    def hf_config(self) -> dict[str, Any]:
        """Return the ``config.json`` of this model, with the special tokens' ids that ``checkpoint/bpe.py`` gives."""
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "d_ff": self.ffn_width,
            "d_kv": self.head_dim,
            "d_model": self.width,
            "decoder_start_token_id": 3,
            "dropout_rate": 0.0,
            "eos_token_id": 0,
            "feed_forward_proj": "gated-silu",
            "layer_norm_epsilon": self.norm_eps,
            "num_decoder_layers": self.num_decoder_layers,
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "pad_token_id": 3,
            "relative_attention_max_distance": self.max_distance,
            "relative_attention_num_buckets": self.num_buckets,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True)
class Seq2SeqRecipe:
    """How to train all weights of an encoder-decoder model."""

    kind: Literal["seq2seq"]
    loop: LoopConfig
    shape: T5Shape | None = None
    """Shape of a model that is trained from scratch; a base has its own."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    base_rate: float = 0.05
    """Factor on both learning rates where a base is trained on, which has learnt most already."""
    smoothing: float = 0.1
    """Share of the loss that asks for every token alike (``train/teacher_forcing.py``)."""
    variation: VariationConfig = field(default_factory=VariationConfig)
    exercises: float = 0.0
    """Number of copying exercises per real pair, in the first epoch."""
    denoising: DenoisingConfig = field(default_factory=DenoisingConfig)
    """Pieces of sources that are to be written whole, in the first epochs."""
    languages: tuple[str, ...] = ()
    """Of a translation: the source's and the text's, as the base's tokenizer names them, such as eng_Latn, fra_Latn."""
    tokens_per_batch: int = 4096
    longest_source: int = 512
    """Most tokens of a source; more are cut off."""
    longest: int = 128
    """Most tokens of a text; pairs with longer ones are left out."""
    held_back: int = 256
    """Number of held-back rows, on which the best weights are selected; all rows of a source are held back together."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"smoothing is a share from 0 to below 1, found {self.smoothing}")
        if min(self.held_back, self.longest_source, self.longest - 1, self.tokens_per_batch - 7) < 1:
            raise ConfigError(
                "held_back and longest_source must be >= 1, longest >= 2 and tokens_per_batch >= 8, found "
                f"{self.held_back}, {self.longest_source}, {self.longest} and {self.tokens_per_batch}"
            )
        if not 0 <= self.exercises < math.inf:
            raise ConfigError(f"exercises must be finite and at least 0, found {self.exercises}")
        if len(self.languages) not in (0, 2):
            raise ConfigError(f"languages are two, the source's and the text's, found {list(self.languages)}")
        if not 0 < self.base_rate < math.inf:
            raise ConfigError(f"base_rate must be positive and finite, found {self.base_rate}")

"""Writing a Llama checkpoint as one GGUF file that llama.cpp runs.

Besides the names, two things differ from the checkpoint. Checkpoints rotate component i of a head together with
component i + D/2, whereas llama.cpp rotates neighbours, so the rows of queries and keys are reordered. And rotary
frequencies that are stretched (linear, llama3) are stored as divisors, one for each pair of components.

Matrices are stored in the requested format, vectors (norms, biases) as float32, which llama.cpp requires. A head that
is tied to the embedding is left out; llama.cpp then uses the embedding. All matrices have the same format: with q4_0
the head is q4_0 too, where llama.cpp's own tool keeps it at six bits, so our file is smaller and faster and its
quality a little lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vivace.checkpoint.files import Tensors, named_file, require_other, resolve
from vivace.checkpoint.gguf.blocks import KINDS, Kind, find_kind
from vivace.checkpoint.gguf.file import Entry, Value, write_gguf
from vivace.checkpoint.gguf.names import gguf_names
from vivace.checkpoint.gguf.tokenizer_keys import tokenizer_keys
from vivace.checkpoint.load import open_checkpoint, read_config
from vivace.checkpoint.names import TensorPiece
from vivace.core.config import ModelConfig, RopeConfig
from vivace.core.rope import frequencies
from vivace.errors import UnsupportedError

FAMILY = "llama"
"""``model_type`` of the checkpoints that can be written."""

_STORED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""GGUF format of each dtype of a checkpoint."""


@dataclass(frozen=True)
class Written:
    """The file that was written."""

    path: Path
    kind: str
    """Format of the matrices, a name of ``blocks.KINDS``."""
    num_bytes: int
    splits_text_alike: bool
    """Whether llama.cpp splits text like this tokenizer does; if not, it has to be given token ids."""


def write_checkpoint(
    source: str | Path, out: str | Path, kind: str = "auto", *, tokenizer: bool = True, ignored: Sequence[str] = ()
) -> Written:
    """Write a checkpoint as GGUF.

    Args:
        source: directory or Hub id of a Llama checkpoint.
        out: the file to write.
        kind: format of the matrices, a name of ``blocks.KINDS``; "auto" is the checkpoint's, and bf16 where that is
            quantized.
        tokenizer: whether to write the tokenizer; without it llama.cpp runs on token ids only.
        ignored: unknown keys of config.json that are read as if they were not there.

    Raises:
        UnsupportedError: the family is not Llama, a setting does not exist in GGUF's Llama, or GGUF cannot hold the
            tokenizer.
        ConfigError: there is no such format, or ``out`` is the checkpoint itself.
        CheckpointError: the checkpoint is missing or broken, or the disk is full; ``out`` is left as it was.
    """
    folder = resolve(source)
    require_other(out, Path(named_file(folder)), "another file for what comes of it")
    family = read_config(folder, ignored).get("model_type")
    if family != FAMILY:
        raise UnsupportedError(f"only {FAMILY} checkpoints can be written as GGUF; this one is {family}")
    opened = open_checkpoint(folder, ignored=ignored)
    config, stored, plan = opened.config, opened.stored, opened.plan
    _require_plain(config)
    chosen = find_kind(_stored_kind(stored, plan["embedding"].pieces[0]) if kind == "auto" else kind)
    words = tokenizer_keys(folder, config.vocab_size) if tokenizer else None
    keys = _model_keys(config, folder.name, chosen) | (words.keys if words else {"tokenizer.ggml.model": "none"})
    entries = [
        entry for name, target in plan.items() for entry in _entries(name, target.pieces, stored, config, chosen)
    ]
    num_bytes = write_gguf(out, keys, entries + list(_rope_entry(config)))
    return Written(Path(out), chosen.name, num_bytes, words is not None and words.splits_alike)


def _require_plain(config: ModelConfig) -> None:
    """Refuse settings that a Llama checkpoint may have and that llama.cpp's Llama does not compute."""
    rope = config.rope(0)
    for is_fine, what in (
        (config.activation == "silu", f"activation {config.activation}"),
        (rope.kind in ("default", "linear", "llama3"), f"rope_type {rope.kind}"),
        (rope.width is None, "partial rotary positions"),
    ):
        if not is_fine:
            raise UnsupportedError(f"a checkpoint with {what} cannot be written as GGUF")


def _stored_kind(stored: Tensors, piece: TensorPiece) -> str:
    """Return the GGUF format that corresponds to the dtype of a stored tensor, bf16 for one that has to be decoded."""
    return _STORED.get(stored.kind(piece.name), "bf16")


def _model_keys(c: ModelConfig, name: str, kind: Kind) -> dict[str, Value]:
    """Return the GGUF keys that describe the model."""
    return {
        "general.architecture": FAMILY,
        "general.name": name,
        "general.file_type": kind.file_code,
        "general.quantization_version": 2,
        f"{FAMILY}.vocab_size": c.vocab_size,
        f"{FAMILY}.context_length": c.max_positions,
        f"{FAMILY}.embedding_length": c.width,
        f"{FAMILY}.block_count": c.num_layers,
        f"{FAMILY}.feed_forward_length": c.ffn_width,
        f"{FAMILY}.attention.head_count": c.num_heads,
        f"{FAMILY}.attention.head_count_kv": c.num_kv_heads,
        f"{FAMILY}.attention.key_length": c.head_dim,
        f"{FAMILY}.attention.value_length": c.head_dim,
        f"{FAMILY}.attention.layer_norm_rms_epsilon": c.norm_eps,
        f"{FAMILY}.rope.dimension_count": c.head_dim,
        f"{FAMILY}.rope.freq_base": c.rope(0).theta,
    }


def _entries(
    ours: str, pieces: tuple[TensorPiece, ...], stored: Tensors, config: ModelConfig, kind: Kind
) -> Iterator[Entry]:
    """Yield the GGUF tensors that one of our parameters becomes."""
    for name, piece in zip(gguf_names(ours, len(pieces)), pieces, strict=True):
        shape = stored.shape(piece.name)
        stem = name.split(".")[-2]
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stem)
        read = partial(stored.tensor, piece.name)
        yield Entry(name, shape, kind if len(shape) > 1 else KINDS["f32"], partial(_rows, read, heads))


def _rows(read: Callable[[], Tensor], heads: int | None) -> Tensor:
    """Read a stored tensor; with ``heads`` given, reorder the rows of each head the way llama.cpp rotates them."""
    values = read()
    if heads is None:
        return values
    by_half = values.view(heads, 2, -1, *values.shape[1:])
    return by_half.transpose(1, 2).reshape(values.shape)


def _rope_entry(config: ModelConfig) -> Iterator[Entry]:
    """Yield the divisors of the rotary frequencies, if there are any."""
    rope = config.rope(0)
    if rope.kind == "default":
        return
    divisors = frequencies(RopeConfig(theta=rope.theta), config.head_dim) / frequencies(rope, config.head_dim)
    yield Entry("rope_freqs.weight", tuple(divisors.shape), KINDS["f32"], lambda: divisors.to(torch.float32))

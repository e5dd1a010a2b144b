"""Soft prompts on disk, in the files of PEFT's prompt tuning: ``adapter_config.json`` and one tensor of embeddings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.files import read_json, read_metadata, read_tensors, staged, write_tensors
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS = "prompt_embeddings"
TOKENIZER = "vivace_tokenizer"
"""Key of the metadata, which PEFT ignores, with the fingerprint of the tokenizer."""
_KIND = "PROMPT_TUNING"


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a fingerprint of how a tokenizer spells its ids; empty where there is none."""
    if tokenizer.is_missing:
        return ""
    pieces = sorted(tokenizer.pieces().items())
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()


def is_soft_prompt(folder: str | Path) -> bool:
    """Return whether a folder holds a soft prompt of PEFT."""
    path = Path(folder) / CONFIG
    return path.is_file() and str(read_json(path).get("peft_type", "")).upper() == _KIND


def load_soft_prompt(folder: str | Path, width: int, tokenizer: Tokenizer) -> Tensor:
    """Read a soft prompt.

    Args:
        folder: as PEFT writes it.
        width: of the model, E.
        tokenizer: of the model.

    Returns:
        Its embeddings, (n, E) float32.

    Raises:
        NotFoundError: there is none.
        UnsupportedError: it is another kind of adapter.
        MismatchError: it is of another width or tokenizer.
        CorruptError: it is empty, truncated, or has numbers that are not finite.
    """
    place = Path(folder)
    if not (place / CONFIG).is_file():
        raise NotFoundError(f"{place} has no {CONFIG}; a soft prompt is a folder as PEFT's prompt tuning writes it")
    kind = str(read_json(place / CONFIG).get("peft_type"))
    if kind.upper() != _KIND:
        raise UnsupportedError(f"{place} is an adapter of kind {kind}, and a pool has soft prompts ({_KIND})")
    tensors = read_tensors(place / TENSORS)
    found = next((value for name, value in tensors.items() if name.endswith(EMBEDDINGS)), None)
    if found is None or found.dim() != 2 or not len(found):
        raise CorruptError(f"{place / TENSORS} has no embeddings (entries, width) under {EMBEDDINGS}")
    if found.shape[1] != width:
        raise MismatchError(f"{place} is of a model of width {found.shape[1]}, and this one has {width}")
    ours, theirs = tokenizer_hash(tokenizer), read_metadata(place / TENSORS).get(TOKENIZER)
    if theirs is not None and theirs != ours:
        raise MismatchError(f"{place} was trained with another tokenizer than this model's; train one for this model")
    if not found.isfinite().all():
        raise CorruptError(f"{place} has numbers that are not finite")
    return found.float()


def save_soft_prompt(folder: Path, embeddings: Tensor, tokenizer: Tokenizer, base_name: str | None) -> None:
    """Write a soft prompt (n, E) as PEFT reads it, completely or not at all.

    Raises:
        CheckpointError: the disk is full; the folder is left as it was.
    """
    config: dict[str, Any] = {
        "peft_type": _KIND,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "num_virtual_tokens": len(embeddings),
        "token_dim": embeddings.shape[1],
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    tensors = {EMBEDDINGS: embeddings.detach().to("cpu", torch.float32).contiguous()}
    with staged(folder) as staging:
        staging.mkdir(parents=True, exist_ok=True)
        write_tensors(staging / TENSORS, tensors, {TOKENIZER: tokenizer_hash(tokenizer)})
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

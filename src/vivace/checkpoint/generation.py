"""Defaults for generation that a checkpoint's authors chose, read from ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.checkpoint.files import read_json, resolve
from vivace.errors import UnsupportedError

HONOURED = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "stop_strings", "forced_eos_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids"),
    *("num_beams", "length_penalty", "early_stopping", "num_return_sequences"),
)
"""Settings that are used as defaults."""

_IN_CONFIG = (
    *(
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bad_words_ids",
        "num_beams",
        "max_length",
    ),
    *("min_length", "length_penalty", "early_stopping", "no_repeat_ngram_size"),
)
"""Settings that encoder-decoder checkpoints without ``generation_config.json`` have in ``config.json``."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None,),
    "begin_suppress_tokens": (None, []),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "remove_invalid_values": (None, False),
    "sequence_bias": (None,),
    "suppress_tokens": (None, []),
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}
"""Settings that would change the text, with the values at which they have no effect."""


def load_generation_defaults(path: str | Path) -> Mapping[str, Any]:
    """Return the generation settings of a checkpoint that are set, under their Hugging Face names.

    Args:
        path: directory or Hub id; without ``generation_config.json`` the result is empty.

    Raises:
        UnsupportedError: the file has a setting that is not supported.
        NotFoundError: there is no such checkpoint.
        CorruptError: the file is not JSON.
    """
    folder = resolve(path)
    found = _read(folder)
    if not found and read_json(folder / "config.json").get("is_encoder_decoder"):
        found = {name: value for name, value in read_json(folder / "config.json").items() if name in _IN_CONFIG}
    for name, neutral in _NEUTRAL.items():
        if found.get(name) not in neutral:
            raise UnsupportedError(
                f"generation_config.json asks for {name} = {found[name]!r}, which is not supported; "
                f"set it to {neutral[-1]!r} there"
            )
    words = found.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise UnsupportedError(
            "generation_config.json asks for bad_words_ids of several tokens; only single ones are barred"
        )
    forced = found.get("forced_eos_token_id")
    if isinstance(forced, list):
        if len(forced) != 1:
            raise UnsupportedError(
                f"generation_config.json asks for forced_eos_token_id = {forced}; name one token there"
            )
        found["forced_eos_token_id"] = forced[0]
    return {name: found[name] for name in HONOURED if found.get(name) is not None}


def load_eos_ids(path: str | Path) -> tuple[int, ...]:
    """Return the end-of-text ids that transformers would use: ``generation_config.json``, or else ``config.json``."""
    folder = resolve(path)
    for found in (_read(folder), read_json(folder / "config.json")):
        ids = found.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of ``generation_config.json``; empty if there is no such file."""
    file = folder / "generation_config.json"
    return read_json(file) if file.is_file() else {}

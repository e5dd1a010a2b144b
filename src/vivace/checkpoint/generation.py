"""Defaults for generation that a checkpoint's authors chose, read from ``generation_config.json``.

Older checkpoints have no such file, and their settings stand in ``config.json``. They are read there as transformers
reads them (``GenerationConfig.from_model_config``), of decoders as of models with an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from vivace.checkpoint.files import read_json, resolve
from vivace.configuration import build
from vivace.errors import ConfigError, UnsupportedError

T = TypeVar("T")

FILE = "generation_config.json"


@dataclass(frozen=True)
class _Settings:
    """Settings that are used as defaults; None is not set."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    stop_strings: tuple[str, ...] | str | None = None
    forced_eos_token_id: tuple[int, ...] | int | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: str | int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: Literal[True, False, "never"] | None = None
    num_return_sequences: int | None = None


@dataclass(frozen=True)
class _Ends:
    """End-of-text ids."""

    eos_token_id: tuple[int, ...] | int | None = None


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

_INNER = ("decoder", "generator", "text_config")
"""Parts of ``config.json`` that may hold the settings of the model that writes; the first that is there counts."""


def load_generation_defaults(path: str | Path) -> Mapping[str, Any]:
    """Return the generation settings of a checkpoint that are set, under their Hugging Face names.

    Args:
        path: directory or Hub id; without ``generation_config.json`` what ``config.json`` says is returned.

    Raises:
        UnsupportedError: the file has a setting that is not supported.
        NotFoundError: there is no such checkpoint.
        CorruptError: the file is not JSON.
        ConfigError: a setting has a value of another type.
    """
    folder, file = resolve(path), FILE
    found = _read(folder)
    if not (folder / FILE).is_file():
        file = "config.json"
        found = _in_config(read_json(folder / file))
    for name, neutral in _NEUTRAL.items():
        if found.get(name) not in neutral:
            raise UnsupportedError(
                f"{file} asks for {name} = {found[name]!r}, which is not supported; set it to {neutral[-1]!r} there"
            )
    settings = _built(_Settings, found, file)
    if any(len(word) != 1 for word in settings.bad_words_ids or ()):
        raise UnsupportedError(f"{file} asks for bad_words_ids of several tokens; only single ones are barred")
    forced = settings.forced_eos_token_id
    if isinstance(forced, tuple):
        if len(forced) != 1:
            raise UnsupportedError(f"{file} asks for forced_eos_token_id = {list(forced)}; name one token there")
        settings = replace(settings, forced_eos_token_id=forced[0])
    return {name: value for name, value in vars(settings).items() if value is not None}


def load_eos_ids(path: str | Path) -> tuple[int, ...]:
    """Return the end-of-text ids that transformers would use: ``generation_config.json``, or else ``config.json``.

    Raises:
        CorruptError: a file is not JSON.
        ConfigError: what stands there is no id and no list of ids.
    """
    folder = resolve(path)
    for file, found in ((FILE, _read(folder)), ("config.json", read_json(folder / "config.json"))):
        ids = _built(_Ends, found, file).eos_token_id
        if ids is not None:
            return ids if isinstance(ids, tuple) else (ids,)
    return ()


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of ``generation_config.json``; empty if there is no such file."""
    file = folder / FILE
    return read_json(file) if file.is_file() else {}


def _in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``config.json`` sets: what stands in the open, and else what its first inner part says."""
    inner = next((config[name] for name in _INNER if config.get(name)), None)
    parts = (inner if isinstance(inner, Mapping) else {}, config)
    return {name: value for part in parts for name, value in part.items() if value is not None}


def _built(kind: type[T], found: Mapping[str, Any], file: str) -> T:
    """Return those settings of a file that a dataclass has, each of its type."""
    names = {field.name for field in fields(cast(Any, kind))}
    return build(kind, {name: value for name, value in found.items() if name in names}, f"{file}: ")


def check_named_tokens(defaults: Mapping[str, Any], num_tokens: int, *, reads_sources: bool) -> None:
    """Refuse generation settings that name tokens which a model of so many does not have.

    Args:
        defaults: generation settings of a checkpoint.
        num_tokens: of the model.
        reads_sources: whether it has an encoder, so that its texts begin with a token of their own.

    Raises:
        ConfigError: they do.
    """
    named: list[tuple[str, Any]] = [("bad_words_ids", word[0]) for word in defaults.get("bad_words_ids", ())]
    named.append(("forced_eos_token_id", defaults.get("forced_eos_token_id")))
    named += [("decoder_start_token_id", defaults.get("decoder_start_token_id"))] if reads_sources else []
    for name, token in named:
        if isinstance(token, int) and not 0 <= token < num_tokens:
            raise ConfigError(f"generation settings: {name} is {token}; this model has tokens 0 to {num_tokens - 1}")

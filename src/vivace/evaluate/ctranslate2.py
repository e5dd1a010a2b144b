"""CTranslate2 beside us: the same weights, token ids, threads and search settings.

It converts a checkpoint by itself, in float32 or with matrices in eight bits, and takes and returns tokens as they are
spelt; both are done before the clock starts and after it stops. Its converter expects a key that today's BART
configurations no longer have, ``normalize_before``; it is written into a copy of ``config.json``.

Its search has other rules for when it ends (it stops a beam search early by default, and takes ``beam_size`` candidates
and not twice as many), so its texts may differ from those of transformers for the same weights; they are counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import DependencyError

KINDS: Mapping[str, str] = {"ctranslate2": "float32", "ctranslate2-int8": "int8"}
"""By name on the command line: what matrices are multiplied in."""


class Search(NamedTuple):
    """Settings of a search, as every peer is given them."""

    num_beams: int
    max_new_tokens: int
    min_new_tokens: int = 0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0


class CTranslate2:
    """A checkpoint converted and loaded by CTranslate2."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, kind: str, *, num_threads: int) -> None:
        """Convert and load a checkpoint.

        Args:
            folder: of the checkpoint.
            tokenizer: spells ids.
            kind: one of ``KINDS``.
            num_threads: threads of one batch.

        Raises:
            DependencyError: ctranslate2 is not installed.
        """
        package, converters = _package("ctranslate2"), _package("ctranslate2.converters")
        self._inner = tokenizer.inner
        self._ends = set(tokenizer.eos_ids)
        compute = KINDS[kind]
        with tempfile.TemporaryDirectory() as place:
            source = _readable(folder, Path(place) / "source")
            converted = str(Path(place) / "converted")
            converters.TransformersConverter(str(source)).convert(
                converted, quantization=None if compute == "float32" else compute
            )
            _name_all(Path(converted) / "config.json", tokenizer)
            self.reads_sources = bool(json.loads((folder / "config.json").read_text()).get("is_encoder_decoder"))
            made = package.Translator if self.reads_sources else package.Generator
            self._model = made(
                converted, device="cpu", compute_type=compute, inter_threads=1, intra_threads=num_threads
            )

    def answer(self, prompts: Sequence[Sequence[int]], search: Search) -> list[tuple[int, ...]]:
        """Return the best text of each prompt, end token excluded."""
        given = [self._inner.convert_ids_to_tokens(list(prompt)) for prompt in prompts]
        settings: dict[str, Any] = {
            "beam_size": search.num_beams,
            "length_penalty": search.length_penalty,
            "no_repeat_ngram_size": search.no_repeat_ngram_size,
            "max_batch_size": 0,
        }
        if self.reads_sources:
            limits = {"max_decoding_length": search.max_new_tokens, "min_decoding_length": search.min_new_tokens}
            found = self._model.translate_batch(given, **settings, **limits, max_input_length=0)
            texts = [self._inner.convert_tokens_to_ids(one.hypotheses[0]) for one in found]
        else:
            limits = {"max_length": search.max_new_tokens, "min_length": search.min_new_tokens}
            found = self._model.generate_batch(given, **settings, **limits, include_prompt_in_result=False)
            texts = [one.sequences_ids[0] for one in found]
        return [tuple(token for token in text if token not in self._ends) for text in texts]


def _readable(folder: Path, copy: Path) -> Path:
    """Return a folder with the files of a checkpoint as the converter reads them."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == "bart":
        config.setdefault("normalize_before", False)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def _name_all(file: Path, tokenizer: Tokenizer) -> None:
    """Name every special token that the converted configuration leaves open, which its reader does not take."""
    config, inner = json.loads(file.read_text(encoding="utf-8")), tokenizer.inner
    some = inner.pad_token or inner.eos_token or inner.convert_ids_to_tokens(0)
    named = {name: some for name, value in config.items() if name.endswith("_token") and value is None}
    file.write_text(json.dumps(config | named), encoding="utf-8")


def _package(name: str) -> Any:
    """Import a part of CTranslate2.

    Raises:
        DependencyError: it is missing.
    """
    try:
        return import_module(name)
    except ImportError as exc:
        raise DependencyError("comparing with CTranslate2 needs it; install vivace[ctranslate2]") from exc

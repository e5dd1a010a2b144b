"""Writing a ``Decoder`` as a Hugging Face checkpoint that plain transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vivace.checkpoint.adapters import STORE, STORE_DATA
from vivace.checkpoint.families import family_of, translate
from vivace.checkpoint.files import INDEX, VOCABULARIES, WEIGHTS, read_json, staged, write_tensors
from vivace.checkpoint.names import Target, layout
from vivace.checkpoint.quantized.settings import dense_config
from vivace.core.model import Decoder
from vivace.errors import CheckpointError, MismatchError, UnsupportedError

TEXT_FILES = (
    *VOCABULARIES,
    *("target.spm", "target_vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "generation_config.json"),
)
"""Files beside the weights that answers depend on and that not every checkpoint has."""


def save_decoder(decoder: Decoder, path: str | Path, hf_config: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``model.safetensors``; other files of the directory are kept.

    Args:
        decoder: a decoder with plain weights in memory, as ``load_decoder`` or training made it.
        path: directory to write; it is created if it does not exist.
        hf_config: the ``config.json`` to write; it must describe this decoder.

    Raises:
        MismatchError: the configuration describes another decoder.
        UnsupportedError: the checkpoint is multimodal, or the weights are packed for a backend.
        CheckpointError: the disk is full; the directory is left as it was.
    """
    with staged_checkpoint(path) as folder:
        write_decoder(decoder, folder, hf_config)


def write_decoder(decoder: Decoder, folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Write the two files of ``save_decoder``; call it inside ``staged_checkpoint``."""
    if "text_config" in hf_config:
        raise UnsupportedError("a multimodal checkpoint cannot be saved; save its text_config as a model of its own")
    family, config = family_of(hf_config), translate(hf_config)
    if family.names.may_untie:  # whether such a file has a head of its own does not stand in its config.json
        config = replace(config, tied_head=decoder.config.tied_head)
    if config != decoder.config:
        raise MismatchError("the config.json to save describes another model than the decoder's own configuration")
    table = layout(family.names, config, family.names.roots[0], family.names.heads[0])
    tensors = dict(stored_tensors(decoder, table))
    kind = str(decoder.dtype).removeprefix("torch.")
    write_tensors(folder / WEIGHTS, tensors)
    text = json.dumps({**dense_config(hf_config), "dtype": kind}, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_checkpoint(decoder: Decoder, hf_config: Mapping[str, Any], texts: Path, out: Path) -> None:
    """Write a decoder together with the text files of another checkpoint, all or nothing.

    Args:
        decoder: as for ``save_decoder``.
        hf_config: the ``config.json`` to write.
        texts: checkpoint whose tokenizer, template and generation settings are copied.
        out: directory to write; it is created if it does not exist.

    Raises:
        MismatchError: the configuration describes another decoder.
        CheckpointError: the disk is full; the directory is left as it was.
    """
    with staged_checkpoint(out) as folder:
        write_decoder(decoder, folder, hf_config)
        copy_text_files(texts, folder)


def stored_tensors(decoder: Decoder, table: Mapping[str, Target]) -> dict[str, Tensor]:
    """Cut the decoder's parameters into the tensors that the family stores, by their stored names."""
    ours = dict(decoder.named_parameters())
    if missing := sorted(set(table) - set(ours)):
        raise UnsupportedError(f"only decoders with plain weights can be saved; this one has no {missing[0]}")
    tensors: dict[str, Tensor] = {}
    for name, target in table.items():
        for piece in target.pieces:
            assert piece.expert is None, "experts are saved one by one"
            values = ours[name].detach()[piece.start : piece.stop]
            tensors[piece.name] = (values.t() if piece.transposed else values).cpu()
    return tensors


def copy_text_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, template and generation settings of a checkpoint; call it inside ``staged_checkpoint``."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextmanager
def staged_checkpoint(path: str | Path) -> Iterator[Path]:
    """Give a folder for one file of weights and what belongs to it; at the end all of it is in place, or nothing.

    An older model's files would change how the new one answers, so its shards or store go; where a tokenizer or
    settings were written, those files of ``TEXT_FILES`` that were not go too.
    """
    out = Path(path)
    stale = _shards_in(out) - {WEIGHTS}
    with staged(path) as folder:
        yield folder
        written = {each.name for each in folder.iterdir()}
    stale |= set(TEXT_FILES) - written if written & set(TEXT_FILES) else set()
    for name in (STORE, STORE_DATA, *stale):  # a store would be opened in place of what was written
        (out / name).unlink(missing_ok=True)


def _shards_in(folder: Path) -> set[str]:
    """Return the names of an index and of the shards beside it; what it names elsewhere is nothing of this model's."""
    if not (folder / INDEX).is_file():
        return set()
    try:
        named = list((read_json(folder / INDEX).get("weight_map") or {}).values())
    except (CheckpointError, AttributeError):  # damaged: it names nothing
        named = []
    return {
        INDEX,
        *(str(each) for each in named if Path(str(each)).name == each and str(each).endswith(".safetensors")),
    }

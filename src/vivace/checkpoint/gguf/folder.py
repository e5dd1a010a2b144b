"""A folder that describes a GGUF file as a checkpoint: configuration, tokenizer and chat template, and where it lies.

Everything else of this package takes checkpoint folders. The folder of a file is made once, in the user's cache
(``vivace.files.cache_folder``), and made anew when the file has changed; it holds no weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vivace.checkpoint.families import family_of, translate
from vivace.checkpoint.files import LINK, read_json, staged
from vivace.checkpoint.gguf.configuration import configuration
from vivace.checkpoint.gguf.header import Header, read_header
from vivace.checkpoint.gguf.pieces import write_tokenizer
from vivace.checkpoint.gguf.tensors import GgufTensors, mapped, values_of
from vivace.checkpoint.gguf.tokenizer_keys import ENDS
from vivace.checkpoint.names import layout
from vivace.errors import CorruptError, NotFoundError
from vivace.files import cache_folder

_MADE_BY = 1
"""Raised when folders come to be made in another way, so that those in caches are made anew."""


def folder_of_file(file: Path) -> Path:
    """Return the folder that describes a GGUF file; it is made if it is not there.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: the file is truncated or no GGUF file.
        UnsupportedError: its architecture, a setting, its tokenizer or a number format is not read.
        CheckpointError: the cache cannot be written.
    """
    path = file.resolve()
    identity = _identity(path)
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{name}"
    if not ((folder / LINK).is_file() and read_json(folder / LINK) == identity):
        _describe(read_header(path), folder, identity)
    return folder


def linked_file(folder: Path) -> Path:
    """Return the GGUF file that a folder describes.

    Raises:
        NotFoundError: the file is no longer there.
        CorruptError: it has changed since.
    """
    identity = read_json(folder / LINK)
    path = Path(str(identity.get("file")))
    if not path.is_file():
        raise NotFoundError(f"the GGUF file {path} is no longer there")
    if _identity(path) != identity:
        raise CorruptError(f"{path} has changed since it was opened; open it again by its own name")
    return path


def open_linked(folder: Path) -> GgufTensors:
    """Open the weights of the GGUF file that a folder describes; raises as ``linked_file``."""
    raw = read_json(folder / "config.json")
    names, config = family_of(raw).names, translate(raw)
    plan = layout(names, config, names.roots[0], names.heads[0])
    return GgufTensors(linked_file(folder), plan, (config.num_heads, config.num_kv_heads))


def _identity(path: Path) -> dict[str, Any]:
    """Return what tells one state of a file from another."""
    try:
        facts = path.stat()
    except OSError as exc:
        raise NotFoundError(f"there is no file {path}") from exc
    return {"file": str(path), "bytes": facts.st_size, "changed_ns": facts.st_mtime_ns, "made_by": _MADE_BY}


def _describe(header: Header, folder: Path, identity: Mapping[str, Any]) -> None:
    """Write the folder of a file."""
    config = configuration(header, partial(values_of, header, mapped(header.path)))
    translate(config)
    with staged(folder) as staging:
        write_tokenizer(header, staging)
        _write(staging / "config.json", config)
        _write(staging / "generation_config.json", _generation(header))
        _write(staging / LINK, identity)


def _generation(header: Header) -> dict[str, Any]:
    """Return the tokens that end a text: that of texts, of turns and of messages."""
    ids = (header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS)
    found = list(dict.fromkeys(int(index) for index in ids if index is not None))
    return {"eos_token_id": found} if found else {}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

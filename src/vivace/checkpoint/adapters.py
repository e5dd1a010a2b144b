"""Adapters on disk: ``config.json`` (kind, base hash, plan, config) and ``adapter_model.safetensors``.

An adapter belongs to one base model. The base hash covers the base's configuration, every tensor's name, shape
and dtype, and the bytes at both ends of every tensor, so that a different model is noticed within milliseconds and
without reading the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from vivace.checkpoint.config_keys import HARMLESS
from vivace.checkpoint.files import GGUF, read_json, read_tensors, resolve, staged, tensor_paths, write_tensors
from vivace.checkpoint.gguf.header import read_header
from vivace.errors import CorruptError, MismatchError, NotFoundError, shown
from vivace.files import write_text

CONFIG = "config.json"
TENSORS = "adapter_model.safetensors"
STORE, STORE_DATA = "store.json", "weights.store"
"""Index and weights of a store, which is a checkpoint in another form; the index's key "base" is the hash of the source
checkpoint."""
_END_BYTES = 64


def base_hash(decoder_dir: str | Path) -> str:
    """Return the fingerprint of a checkpoint; it does not depend on how the weights are sharded.

    Returns:
        64 hexadecimal digits (SHA-256).

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptError: one of its files is truncated.
    """
    folder = resolve(decoder_dir)
    if (folder / STORE).is_file():
        return str(read_json(folder / STORE).get("base"))
    config = read_json(folder / "config.json")
    used = {k: v for k, v in config.items() if k not in HARMLESS or k == "model_type"}
    digest = hashlib.sha256(json.dumps(used, sort_keys=True).encode())
    _add_tensors(digest, set(tensor_paths(folder).values()))
    return digest.hexdigest()


def weights_hash(path: Path) -> str:
    """Return eight hexadecimal digits that differ between files of tensors that were trained apart."""
    digest = hashlib.sha256()
    _add_tensors(digest, {path})
    return digest.hexdigest()[:8]


def _add_tensors(digest: hashlib._Hash, paths: Collection[Path]) -> None:
    """Add the fingerprints of all tensors of some files, in the order of their names."""
    for name, line in sorted(line for path in sorted(paths) for line in _ends(path)):
        digest.update(name.encode() + b"\0" + line)


def _ends(path: Path) -> list[tuple[str, bytes]]:
    """Return, for each tensor of a file, its name and its fingerprint (dtype, shape and end bytes)."""
    if path.suffix.lower() == GGUF:
        return _gguf_ends(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return [(name, _line(file, 8 + length, entry)) for name, entry in header.items()]


def _gguf_ends(path: Path) -> list[tuple[str, bytes]]:
    """Return the same of the tensors of a GGUF file."""
    entries = read_header(path).tensors
    with path.open("rb") as file:
        return [
            (
                name,
                _line(file, each.start, {"dtype": each.type, "shape": each.shape, "data_offsets": (0, each.num_bytes)}),
            )
            for name, each in entries.items()
        ]


def _line(file: BinaryIO, start: int, entry: Mapping[str, Any]) -> bytes:
    """Return dtype and shape of a tensor as text, followed by its first and last ``_END_BYTES`` bytes."""
    first, stop = (start + offset for offset in entry["data_offsets"])
    size = min(_END_BYTES, stop - first)
    file.seek(first)
    head = file.read(size)
    file.seek(stop - size)
    return f"{entry['dtype']}{entry['shape']}".encode() + head + file.read(size)


def save_adapter(
    folder: str | Path,
    kind: str,
    base: str,
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write an adapter, completely or not at all.

    Args:
        folder: directory to write; it is created if it does not exist.
        kind: name of the method the adapter is for, such as "multirate".
        base: ``base_hash`` of the checkpoint it was trained on.
        plan: how the weights are used when decoding (shape of drafts, thresholds); ``vivace tune`` replaces it.
        config: configuration of the method.
        tensors: weights of the method.

    Raises:
        CheckpointError: the disk is full; the folder is left as it was.
    """
    with staged(folder) as staging:
        write_adapter(staging, {"kind": kind, "base_hash": base, "plan": plan, "config": config}, tensors)


def write_adapter(folder: Path, written: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the two files of an adapter, ``written`` being the content of ``config.json``; call it inside
    ``staged``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors)
    (folder / CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def replace_plan(folder: str | Path, plan: Mapping[str, Any]) -> None:
    """Replace the plan in an adapter's ``config.json``; its weights are not touched.

    Raises:
        NotFoundError: there is no adapter in the folder.
        OSError: the folder cannot be written; the file is left as it was.
    """
    path = Path(folder) / CONFIG
    written = {**read_json(path), "plan": plan}
    write_text(path, json.dumps(written, indent=2, sort_keys=True) + "\n")


def load_adapter(folder: str | Path, expected_base_hash: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read an adapter.

    Args:
        folder: its directory.
        expected_base_hash: ``base_hash`` of the checkpoint it is to run on; None skips the check.

    Returns:
        The whole ``config.json`` ("kind", "base_hash", "plan", "config") and the weights, memory-mapped.

    Raises:
        NotFoundError: there is no adapter in the folder.
        MismatchError: the adapter was trained on another base.
        CorruptError: a file is truncated or a key is missing.
    """
    place = Path(folder)
    if not place.is_dir():
        raise NotFoundError(f"there is no adapter directory {place}")
    if not (place / CONFIG).is_file():
        raise NotFoundError(
            f"{place} has no {CONFIG}; an adapter is a folder that vivace train wrote, or a LoRA of PEFT's "
            "(adapter_config.json)"
        )
    found = read_json(place / CONFIG)
    if missing := sorted({"kind", "base_hash", "plan", "config"} - set(found)):
        raise CorruptError(f"{place / CONFIG} lacks {', '.join(missing)}; it is not an adapter's configuration")
    if wrong := [name for name in ("plan", "config") if not isinstance(found[name], dict)]:
        raise CorruptError(f"{place / CONFIG}: {wrong[0]} must be an object, found {shown(found[wrong[0]])}")
    if not isinstance(found["base_hash"], str):
        raise CorruptError(f"{place / CONFIG}: base_hash must be a text, found {shown(found['base_hash'])}")
    if expected_base_hash is not None and found["base_hash"] != expected_base_hash:
        raise MismatchError(
            f"the adapter {place} was trained on base {found['base_hash'][:12]}, this model is "
            f"{expected_base_hash[:12]}; train it on this model, or load the one it belongs to"
        )
    return found, read_tensors(place / TENSORS)

"""A LoRA merged into its base: a checkpoint of its own, which needs no adapter and is as fast as the base.

Besides what a request can wear (``peft.py``), this takes what only a checkpoint can have: DoRA (Liu et al. 2024,
arXiv:2402.09353), whose rows are scaled to a trained norm, ``m (W + s B A) / ||W + s B A||``; LoRAs on the embedding
and the head; and biases and whole modules that were trained beside the LoRA. A head that is tied to the embedding
becomes a matrix of its own where only one of the two was trained.

Sums are made in float32 and rounded once, to the dtype of the base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.families import Family, family_of, translate
from vivace.checkpoint.files import (
    WEIGHTS,
    is_linked,
    open_tensors,
    read_json,
    read_tensors,
    resolve,
    write_tensors,
)
from vivace.checkpoint.lora_config import CONFIG, LoraSettings, read_settings
from vivace.checkpoint.peft import (
    PREFIX,
    TENSORS,
    Module,
    ModuleTable,
    base_of,
    check_targets,
    checked,
    require_finite,
)
from vivace.checkpoint.quantized.settings import is_quantized
from vivace.checkpoint.save import copy_text_files, staged_checkpoint
from vivace.errors import ConfigError, MismatchError, UnsupportedError

MERGED = frozenset({"bias", "modules_to_save"})
"""Settings beyond a LoRA that can be merged."""


@dataclass(frozen=True)
class Merged:
    """What was written."""

    folder: Path
    num_changed: int
    """Number of tensors that the adapter changed."""
    num_bytes: int
    is_untied: bool
    """Whether the head has become a matrix of its own."""


def merge_checkpoint(base: str | Path, adapter: str | Path, out: str | Path) -> Merged:
    """Write a checkpoint with an adapter merged into it, completely or not at all.

    Args:
        base: the checkpoint.
        adapter: PEFT's folder.
        out: directory to write; it is created if it does not exist.

    Raises:
        ConfigError: ``out`` is the base or the adapter.
        CheckpointError: something is missing, broken or of another base.
        UnsupportedError: the adapter is more than what can be merged, or the base's weights are stored in codes.
    """
    folder, place = resolve(base), Path(adapter)
    if Path(out).resolve() in (folder.resolve(), place.resolve()):
        raise ConfigError(f"{out} is the base or the adapter itself; name another folder for what comes of them")
    raw = read_json(folder / "config.json")
    if is_linked(folder) or is_quantized(raw):
        raise UnsupportedError(f"{base} is stored in codes; decode it first: vivace convert OUT --dense")
    merging = _Merging(folder, raw, place)
    tensors, changed = merging.tensors()
    config = {**raw, **({"tie_word_embeddings": False} if merging.is_untied else {})}
    with staged_checkpoint(out) as staging:
        write_tensors(staging / WEIGHTS, tensors)
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        copy_text_files(folder, staging)
    total = sum(tensor.nbytes for tensor in tensors.values())
    return Merged(Path(out), len(changed), total, merging.is_untied)


class _Merging:
    """One merge: the tensors of the base, and what an adapter makes of them."""

    def __init__(self, base: Path, raw: Mapping[str, Any], place: Path) -> None:
        self.place = place
        self.family: Family = family_of(raw)
        self.config = translate(raw)
        self.table = ModuleTable(self.family.names, self.config)
        self.settings: LoraSettings = read_settings(place)
        if extras := [extra for extra in self.settings.extras if extra.split(" = ")[0] not in MERGED]:
            raise UnsupportedError(f"{place} has {', '.join(extras)}, which cannot be merged")
        base_of(place, base_hash(base))
        self.stored = open_tensors(base)
        names = self.family.names
        present = set(self.stored.names)
        self.root = next((r for r in names.roots if f"{r}{names.embedding}.weight" in present), names.roots[0])
        self.is_untied = False
        """Whether the head is another matrix than the embedding now."""
        self.keeps_tie = bool(read_json(place / CONFIG).get("ensure_weight_tying"))
        self.found = _by_module(read_tensors(place / TENSORS))

    def tensors(self) -> tuple[dict[str, Tensor], set[str]]:
        """Return all tensors of the merged checkpoint, and the names of those that differ from the base's."""
        changed: dict[str, Tensor] = {}
        lora = [module for module, parts in self.found.items() if {"A", "B"} & set(parts)]
        if matrices := [module for module in lora if self._is_matrix(module)]:
            check_targets(self.settings, matrices, self.table, self.place)
        for module, parts in self.found.items():
            require_finite(parts, module, self.place)
            self._merge(module, parts, changed)
        self._untie(changed)
        return {
            name: changed[name] if name in changed else self.stored.tensor(name) for name in self._all(changed)
        }, set(changed)

    def _untie(self, changed: dict[str, Tensor]) -> None:
        """Give a tied head a matrix of its own where the adapter makes it another than the embedding."""
        if not self.config.tied_head:
            return
        head, table = f"{self.family.names.heads[0]}.weight", f"{self.root}{self.family.names.embedding}.weight"
        if table in changed and head not in changed and not self.keeps_tie:
            changed[head] = self.stored.tensor(table)
        if head in changed:
            self.is_untied = not torch.equal(changed[head], changed.get(table, self.stored.tensor(table)))
            if not self.is_untied:
                del changed[head]

    def _all(self, changed: Mapping[str, Tensor]) -> list[str]:
        """Return the names of all tensors; a copy of a tied head that the base stores beside the embedding is left."""
        heads = {f"{name}.weight" for name in self.family.names.heads} if self.config.tied_head else set()
        return [
            *(name for name in self.stored.names if name not in heads),
            *(n for n in changed if self._is_new(n, heads)),
        ]

    def _is_new(self, name: str, heads: set[str]) -> bool:
        return name in heads or name not in self.stored.names

    def _is_matrix(self, module: str) -> bool:
        return self.table.stem(module) in self.table.modules

    def _merge(self, module: str, parts: Mapping[str, Tensor], changed: dict[str, Tensor]) -> None:
        """Put the parts of one module into ``changed``."""
        name = self._stored_name(module)
        transposed = self.family.names.transposed and self._is_matrix(module)
        for leaf in ("weight", "bias"):
            if leaf in parts:
                self._replace(f"{name}.{leaf}", parts[leaf], changed)
        if {"A", "B"} & set(parts):
            weight = self._own(f"{name}.weight").float()
            rows = weight.t() if transposed else weight
            merged = self._with_lora(module, rows, parts)
            self._put(f"{name}.weight", merged.t() if transposed else merged, changed)
        elif {"embedding_A", "embedding_B"} <= set(parts):
            self._merge_embedding(module, name, parts, changed)
        elif rest := sorted(set(parts) - {"weight", "bias"}):
            raise UnsupportedError(f"{self.place} has {rest[0]} of {module}, which cannot be merged")

    def _merge_embedding(self, module: str, name: str, parts: Mapping[str, Tensor], changed: dict[str, Tensor]) -> None:
        """Add a LoRA of the embedding: A (rank, V), B (E, rank)."""
        if "magnitude_vector" in parts:
            raise UnsupportedError(f"{self.place} is a DoRA of {module}, which cannot be merged")
        table = self.stored.tensor(f"{name}.weight").float()
        down, up = parts["embedding_A"].float(), parts["embedding_B"].float()
        if (down.shape[1], up.shape[0]) != tuple(table.shape):
            raise MismatchError(f"{self.place}: the LoRA of {module} is for another embedding; it is of another base")
        self._put(f"{name}.weight", table + self.settings.scale_of(module) * (up @ down).t(), changed)

    def _with_lora(self, module: str, rows: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return a matrix (out, in) with the terms of a module added."""
        stem = self.table.stem(module)
        known = self.table.modules.get(stem) or Module(stem, rows.shape[1], rows.shape[0], ())
        down, up = checked(parts, known, self.settings.rank_of(module), self.place)
        merged: Tensor = rows + self.settings.scale_of(module) * (up @ down)
        if not self.settings.use_dora:
            return merged
        norm = parts.get("magnitude_vector")
        if norm is None or norm.numel() != len(rows):
            raise MismatchError(f"{self.place} is a DoRA and lacks the norms of {module}")
        scale: Tensor = norm.float().reshape(-1) / torch.linalg.norm(merged, dim=1)
        return merged * scale[:, None]

    def _stored_name(self, module: str) -> str:
        """Return the name of a module in the base's files.

        Raises:
            MismatchError: the base has no such module.
        """
        stem = self.table.stem(module)
        name = stem if stem in self.family.names.heads else self.root + stem
        is_head = stem in self.family.names.heads
        if f"{name}.weight" in self.stored.names or (is_head and self.config.tied_head):
            return name
        raise MismatchError(f"{self.place} adapts {module}, which this model does not have; it is of another base")

    def _replace(self, name: str, value: Tensor, changed: dict[str, Tensor]) -> None:
        """Put a whole tensor that was trained beside the LoRA."""
        own = self._own(name)
        if tuple(own.shape) != tuple(value.shape):
            raise MismatchError(f"{self.place} has {name} of shape {list(value.shape)}, this model {list(own.shape)}")
        self._put(name, value, changed)

    def _own(self, name: str) -> Tensor:
        """Return a tensor of the base; a tied head is the embedding."""
        if name in self.stored.names:
            return self.stored.tensor(name)
        if self.config.tied_head and name.removesuffix(".weight") in self.family.names.heads:
            return self.stored.tensor(f"{self.root}{self.family.names.embedding}.weight")
        raise MismatchError(f"{self.place} has {name}, which this model does not have; it is of another base")

    def _put(self, name: str, value: Tensor, changed: dict[str, Tensor]) -> None:
        """Take a tensor in the base's dtype; a tied head that differs from the embedding becomes its own."""
        changed[name] = value.to(self._own(name).dtype).contiguous()


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the parts of every module by its full name: A, B, embedding_A, embedding_B, magnitude_vector of a LoRA,
    and weight and bias of what was trained as a whole.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        plain = name.removeprefix(PREFIX)
        module, is_lora, leaf = plain.rpartition(".lora_")
        if is_lora:
            leaf = leaf.removesuffix(".weight")
        else:
            module, _, leaf = plain.rpartition(".")
        found.setdefault(module.removesuffix(".base_layer"), {})[leaf] = value
    return found

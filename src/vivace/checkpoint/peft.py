"""LoRA adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written.

A LoRA (Hu et al. 2021, arXiv:2106.09685) adds ``scale B A`` to some matrices of a model: A (rank, in), B (out, rank),
``scale = alpha / rank``, or ``alpha / sqrt(rank)`` with ``use_rslora`` (Kalajdzievski 2023, arXiv:2312.03732). PEFT
names factors by the modules of transformers; the tables of ``names.py`` say which of our sites these are. A module that
transformers fuses (Phi-3's ``qkv_proj``, GPT-2's ``c_attn``) has one A for several sites, each of which takes its rows
of B.

What cannot be added row by row is refused by name: DoRA, trained biases, embeddings, heads and ``modules_to_save``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vivace.checkpoint.files import read_metadata, read_tensors, staged, summary, write_tensors
from vivace.checkpoint.lora_config import CONFIG, LoraSettings, read_settings
from vivace.checkpoint.names import Names, layout
from vivace.core.config import ModelConfig
from vivace.core.low_rank import Site
from vivace.errors import CheckpointError, CorruptError, MismatchError, UnsupportedError

T = TypeVar("T")

TENSORS = "adapter_model.safetensors"
BASE = "vivace_base"
"""Key of the base's hash in the metadata of the safetensors file, which PEFT ignores."""
PREFIX = "base_model.model."
"""What PEFT writes before every name."""
MERGE = "merge it into a checkpoint of its own: vivace convert OUT --model MODEL --merge DIR"
"""What to do with an adapter that no request can wear."""

Factors = Mapping[Site, tuple[Tensor, Tensor]]
"""Site -> down (rank, in) and up (out, rank)."""


@dataclass(frozen=True)
class Module:
    """A matrix of transformers, and which of our sites its outputs are."""

    stem: str
    """Name without the root, such as ``layers.0.self_attn.q_proj``."""
    in_width: int
    out_width: int
    sites: tuple[tuple[Site, int, int], ...]
    """Each site with its first row of the matrix and the row after its last."""


class ModuleTable:
    """The matrices of a model that LoRA may adapt, by the names that transformers gives them."""

    def __init__(self, names: Names, config: ModelConfig) -> None:
        """List the matrices of all layers; experts are left out."""
        self.names = names
        self.config = config
        self.modules = {module.stem: module for module in _modules(names, config)}
        self._roots = [root for root in sorted(names.roots, key=len, reverse=True) if root]

    def full_name(self, stem: str) -> str:
        """Return the name of a module in the model of transformers that PEFT wraps."""
        return self.names.roots[0] + stem

    def stem(self, name: str) -> str:
        """Return the name of a module without its root, whichever of the family's roots it has."""
        return next((name.removeprefix(root) for root in self._roots if name.startswith(root)), name)

    def what_is(self, name: str) -> str | None:
        """Return what a module is that LoRA does not adapt here, or None for a module that the model has not."""
        stem, names = self.stem(name), self.names
        if stem in (names.embedding, names.positions):
            return "the embedding"
        if name in names.heads or stem in names.heads:
            return "the head"
        if "experts" in stem.split(".") or (names.router and stem.endswith(f".{names.router}")):
            return "experts of a mixture, or their router"
        norms = (names.final_norm, names.attention_norm, names.ffn_norm)
        return "a norm" if stem.rpartition(".")[2] in norms or stem in norms else None


def _modules(names: Names, config: ModelConfig) -> Iterable[Module]:
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    halves = ("gate", "up") if config.gated else ("up",)
    table = layout(names, config, "", names.heads[0])
    for layer in range(config.num_layers):
        parts = {
            "qkv": (("q", heads), ("k", keys), ("v", keys)),
            "o": (("o", config.width),),
            "feed_forward.up": tuple((half, config.ffn_width) for half in halves),
            "feed_forward.down": (("down", config.width),),
        }
        for part, sites in parts.items():
            target = table.get(f"layers.{layer}.{part}.weight")
            for piece in () if target is None else target.pieces:
                stem, width = piece.name.removesuffix(".weight"), target.shape[1] if target else 0
                own, first = [], 0
                for site, size in sites:
                    if piece.start <= first and first + size <= piece.stop:
                        own.append(((layer, site), first - piece.start, first - piece.start + size))
                    first += size
                yield Module(stem, width, piece.stop - piece.start, tuple(own))


@dataclass(frozen=True)
class Lora:
    """A LoRA that was read."""

    factors: Factors
    """In float32, the scale in the up factors."""
    base: str | None
    """``base_hash`` of the model it was trained on, where its file says so."""
    settings: LoraSettings
    scale: float | None
    """The scale of all up factors; None where they have several."""
    stored: torch.dtype | None
    """In which the file has all factors; None where it has them in several."""


def load_lora(
    folder: str | Path, table: ModuleTable, expected_base: str | None = None, *, is_known: bool = False
) -> Lora:
    """Read a LoRA.

    Args:
        folder: a folder as PEFT's ``save_pretrained`` writes it.
        table: the matrices of the model that it is for.
        expected_base: ``base_hash`` of that model; a file that names another is refused, one that names none is checked
            by names and shapes alone.
        is_known: whether the same files were read before, so that their numbers need not be looked at again.

    Raises:
        NotFoundError: there is no such folder or file.
        CorruptError: a file is truncated or has numbers that are not finite.
        MismatchError: it is of another base: a module or a shape does not fit, or the base's hash is another.
        UnsupportedError: it has parts that are no LoRA on the matrices of layers.
    """
    settings, place = read_settings(folder), Path(folder)
    _refuse_extras(settings, place)
    base = base_of(place, expected_base)
    pairs = _pairs(read_tensors(place / TENSORS), table, place)
    check_targets(settings, pairs, table, place)
    factors: dict[Site, tuple[Tensor, Tensor]] = {}
    scales = {settings.scale_of(name) for name in pairs}
    kinds = {part.dtype for pair in pairs.values() for part in pair.values()}
    for name, found in pairs.items():
        module = table.modules[table.stem(name)]
        down, up = checked(found, module, settings.rank_of(name), place, is_known=is_known)
        scale = settings.scale_of(name)
        up = up if scale == 1 else up * scale
        is_shared = len(module.sites) > 1
        factors.update({site: (down, up[first:stop] if is_shared else up) for site, first, stop in module.sites})
    if not factors:
        raise CorruptError(f"{place / TENSORS} has no factors")
    return Lora(factors, base, settings, _only(scales), _only(kinds))


def _only(found: set[T]) -> T | None:
    """Return the one thing of a set; None where it has several."""
    return next(iter(found)) if len(found) == 1 else None


def _refuse_extras(settings: LoraSettings, place: Path) -> None:
    """Refuse settings that change more than a LoRA does."""
    if settings.use_dora:
        raise UnsupportedError(f"{place} is a DoRA (use_dora), which scales whole columns; {MERGE}")
    if settings.extras:
        raise UnsupportedError(f"{place} has {', '.join(settings.extras)}, which is more than a LoRA; {MERGE}")


def base_of(place: Path, expected: str | None) -> str | None:
    """Return the hash of the base that a file names, or None where it names none.

    Raises:
        MismatchError: it is another than the one expected.
    """
    base = read_metadata(place / TENSORS).get(BASE)
    if base is not None and expected is not None and base != expected:
        raise MismatchError(
            f"the adapter {place} was trained on base {base[:12]}, this model is {expected[:12]}; train it on this "
            "model, or load the one it belongs to"
        )
    return base


def _pairs(tensors: Mapping[str, Tensor], table: ModuleTable, place: Path) -> dict[str, dict[str, Tensor]]:
    """Return the two factors of every module, by its name in the file."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        module, _, leaf = name.removeprefix(PREFIX).rpartition(".lora_")
        if leaf not in ("A.weight", "B.weight"):
            owner = "the embedding" if "lora_embedding" in name else table.what_is(_module(name))
            raise UnsupportedError(f"{place} has {name}, which belongs to {owner or 'no matrix of a layer'}; {MERGE}")
        stem = table.stem(module)
        if stem not in table.modules:
            if what := table.what_is(module):
                raise UnsupportedError(f"{place} adapts {module}, {what}, which a request cannot bring; {MERGE}")
            raise MismatchError(f"{place} adapts {module}, which this model does not have; it is of another base")
        found.setdefault(module, {})[leaf[0]] = value
    return found


def _module(name: str) -> str:
    """Return the module that a stored tensor belongs to."""
    return name.removeprefix(PREFIX).rpartition(".")[0]


def check_targets(settings: LoraSettings, found: Iterable[str], table: ModuleTable, place: Path) -> None:
    """Refuse a file that lacks modules at which its configuration aims, or has others.

    Args:
        settings: the configuration, which speaks of modules by the names that they had in training.
        found: modules of the file, by these names.
        table: the matrices of the model.
        place: folder of the file.

    Raises:
        CorruptError: a module is missing, or is not named.
        MismatchError: the model has none of the modules.
    """
    if settings.targets is None:
        return
    named = {table.stem(name): name for name in found}
    root = next((name.removesuffix(stem) for stem, name in named.items()), table.names.roots[0])
    aimed = {stem for stem in table.modules if settings.aims_at(named.get(stem, root + stem))}
    if not aimed:
        raise MismatchError(
            f"{place} adapts {_spelt(settings.targets)}, and this model has no such modules; it is of another base"
        )
    if missing := sorted(aimed - set(named)):
        raise CorruptError(f"{place / TENSORS} lacks the factors of {summary(missing)}, which {CONFIG} names")
    if extra := sorted(set(named) - aimed):
        raise CorruptError(f"{place / TENSORS} has factors of {summary(extra)}, which {CONFIG} does not name")


def _spelt(targets: Sequence[str] | str) -> str:
    return targets if isinstance(targets, str) else summary(list(targets))


def checked(
    pair: Mapping[str, Tensor], module: Module, rank: int, place: Path, *, is_known: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the two factors of a module in float32; of a file that is known their numbers are not looked at.

    Raises:
        CorruptError: one is missing or has numbers that are not finite.
        MismatchError: a shape does not fit the model, or the rank is not that of the configuration.
    """
    if missing := sorted({"A", "B"} - set(pair)):
        raise CorruptError(f"{place / TENSORS} lacks lora_{missing[0]} of {module.stem}")
    for name, shape in (("A", (rank, module.in_width)), ("B", (module.out_width, rank))):
        if tuple(pair[name].shape) != shape:
            raise MismatchError(
                f"{place}: lora_{name} of {module.stem} is {list(pair[name].shape)}, expected {list(shape)} for this "
                "model; it is of another base, or its rank is not the one its configuration says"
            )
    if not is_known:
        require_finite({name: pair[name] for name in "AB"}, module.stem, place)
    return pair["A"].float(), pair["B"].float()


def require_finite(parts: Mapping[str, Tensor], module: str, place: Path) -> None:
    """Refuse tensors of a module that have infinite numbers or none.

    Raises:
        CorruptError: names the first.
    """
    for name, part in parts.items():
        if not bool(torch.isfinite(part).all()):
            raise CorruptError(f"{place}: lora_{name} of {module} has numbers that are not finite")


def save_lora(
    folder: str | Path,
    factors: Factors,
    table: ModuleTable,
    *,
    scale: float = 1.0,
    base: str | None = None,
    base_name: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a LoRA as PEFT reads it, completely or not at all.

    Args:
        folder: directory to write; it is created if it does not exist.
        factors: at our sites; sites of one module of transformers are written as one.
        table: the matrices of the model.
        scale: factor on every product of an up factor with its down factor.
        base: ``base_hash`` of the model.
        base_name: name or folder of the model, for PEFT.
        dtype: of the file; None is the factors' own.

    Raises:
        CheckpointError: the disk is full; the folder is left as it was.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module in table.modules.values():
        pair = _joined(module, factors)
        if pair is None:
            continue
        ranks[module.stem] = len(pair[0])
        for name, factor in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{table.full_name(module.stem)}.lora_{name}.weight"] = factor.detach().to(
                "cpu", dtype or factor.dtype, copy=True
            )
    if not tensors:
        raise CheckpointError(f"there are no factors to write to {folder}")
    config = _written(table, ranks, scale, base_name)
    with staged(folder) as staging:
        write_tensors(staging / TENSORS, tensors, {} if base is None else {BASE: base})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (staging / CONFIG).write_text(text, encoding="utf-8")


def _joined(module: Module, factors: Factors) -> tuple[Tensor, Tensor] | None:
    """Return the factors of a module of transformers: one down factor, or those of its sites one below the other."""
    own = [(factors[site], first, stop) for site, first, stop in module.sites if site in factors]
    if not own:
        return None
    downs = [down for (down, _), _, _ in own]
    is_shared = all(down is downs[0] or torch.equal(down, downs[0]) for down in downs)
    down = downs[0] if is_shared else torch.cat(downs)
    up = down.new_zeros(module.out_width, len(down))
    column = 0
    for (factor, part), first, stop in own:
        up[first:stop, column : column + len(factor)] = part
        column += 0 if is_shared else len(factor)
    return down, up


def _written(table: ModuleTable, ranks: Mapping[str, int], scale: float, base_name: str | None) -> dict[str, Any]:
    """Return ``adapter_config.json``: endings of names where all layers are alike, else every module by itself."""
    common = max(set(ranks.values()), key=list(ranks.values()).count)
    endings = _endings(table, ranks)
    ending_ranks = {ending: {ranks[stem] for stem in stems} for ending, stems in endings.items()}
    unlike = {ending: next(iter(found)) for ending, found in ending_ranks.items() if found != {common}}
    if any(len(found) > 1 for found in ending_ranks.values()):
        unlike = {stem: rank for stem, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": common,
        "lora_alpha": scale * common,
        "target_modules": sorted(endings),
        "rank_pattern": {re.escape(name): rank for name, rank in unlike.items()},
        "alpha_pattern": {re.escape(name): scale * rank for name, rank in unlike.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": table.names.transposed,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _endings(table: ModuleTable, ranks: Mapping[str, int]) -> dict[str, list[str]]:
    """Return what names the adapted modules and no others: their names within a layer if every layer has them."""
    before = re.compile(re.escape(table.names.layer).replace(r"\{\}", r"\d+"))

    def within(stem: str) -> str:
        return before.sub("", stem, count=1)

    every: dict[str, list[str]] = {}
    for stem in table.modules:
        every.setdefault(within(stem), []).append(stem)
    adapted = {within(stem) for stem in ranks}
    if {stem for name in adapted for stem in every[name]} == set(ranks):
        return {name: every[name] for name in adapted}
    return {stem: [stem] for stem in ranks}

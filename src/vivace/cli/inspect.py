"""``vivace inspect``: show what a checkpoint, store or adapter folder contains, without loading it."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import folder_of
from vivace.errors import ConfigError
from vivace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from vivace.checkpoint.files import Tensors


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="A model or adapter folder, or a Hub id; left out: the model that ships.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read a store and compare every checksum.")] = False,
    weights: options.Weights = "bf16",
    ignore_config_key: options.IgnoreConfigKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the configuration, size and adapters of a checkpoint, or the contents of a store or adapter."""
    from vivace.checkpoint.adapters import TENSORS
    from vivace.storage.store import is_store

    folder = folder_of(model)
    if verify and not is_store(folder):
        raise ConfigError(f"--verify is for a store, {folder} is none; leave it out")
    is_adapter = (folder / TENSORS).is_file()
    if ignore_config_key and (is_store(folder) or is_adapter):
        raise ConfigError(f"--ignore-config-key is for a checkpoint, {folder} is none; leave it out")
    if weights != "bf16" and (is_store(folder) or is_adapter):
        raise ConfigError(f"--weights is for a checkpoint, {folder} is none; leave it out")
    if is_store(folder):
        facts = store_facts(folder, verify=verify)
    else:
        facts = adapter_facts(folder) if is_adapter else model_facts(folder, weights, ignore_config_key or ())
    if not tensors:
        del facts["tensors"]
    if as_json:
        console.json(facts)
        return
    for name, value in facts.items():
        if name == "config":  # long, and most of it is among the other facts
            continue
        if name == "tensors":
            for tensor in value:
                bits = f"  {tensor['bits']:.2f} bits" if "bits" in tensor else ""
                console.result(f"  {tensor['name']}  {tensor['dtype']} {tensor['shape']}{bits}")
        else:
            console.result(f"{name:<20}{_plain(name, value)}")


def model_facts(folder: Path, weights: str = "bf16", ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts that are shown about a checkpoint.

    Args:
        folder: the checkpoint.
        weights: weight format for which to compute the size in memory.
        ignored: unknown keys of config.json that are read as if they were not there.

    Raises:
        CheckpointError: a file is missing or broken.
        UnsupportedError: a family or setting is not supported.
    """
    from vivace.checkpoint.files import is_linked, open_tensors, read_json
    from vivace.checkpoint.gguf.folder import linked_file
    from vivace.checkpoint.load import least_bytes, load_config
    from vivace.kernels.low_bit import check_weights

    kept = check_weights(weights)
    config = load_config(folder, ignored)
    stored = open_tensors(folder)
    names = sorted(stored.names)
    adapters = folder / "adapters"
    return {
        "folder": str(folder),
        **({"file": str(linked_file(folder))} if is_linked(folder) else {}),
        "model_type": read_json(folder / "config.json")["model_type"],
        "parameters": sum(prod(stored.shape(name)) for name in names),
        "bytes": sum(stored.num_bytes(name) for name in names),
        "dtypes": sorted({stored.kind(name) for name in names}),
        **_bits(stored, names),
        "weights": kept,
        "bytes_in_memory": least_bytes(folder, "bfloat16", kept, ignored),
        "layers": config.num_layers,
        "width": config.width,
        "ffn_width": config.ffn_width,
        "heads": [config.num_heads, config.num_kv_heads],
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "tied_head": config.tied_head,
        "adapters": sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else [],
        "config": asdict(config),
        "tensors": [
            {
                "name": name,
                "dtype": stored.kind(name),
                "shape": list(stored.shape(name)),
                "bits": stored.num_bytes(name) * 8 / max(1, prod(stored.shape(name))),
            }
            for name in names
        ],
    }


def _bits(stored: Tensors, names: Sequence[str]) -> dict[str, Any]:
    """Return the bits that a weight takes in the file, over everything and for each kind that is no plain dtype."""
    import torch

    def mean(some: Sequence[str]) -> float:
        return sum(stored.num_bytes(name) for name in some) * 8 / max(1, sum(prod(stored.shape(name)) for name in some))

    coded = [name for name in names if getattr(torch, stored.kind(name), None) is None]
    kinds = sorted({stored.kind(name) for name in coded})
    each = {kind: mean([name for name in coded if stored.kind(name) == kind]) for kind in kinds}
    return {"bits_a_weight": {"all": mean(names), **each}} if coded else {}


def store_facts(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return the facts that are shown about a store; with ``verify``, read it all and compare the checksums.

    Raises:
        CheckpointError: a file is missing, broken or not part of the store.
    """
    from vivace.checkpoint.files import read_json
    from vivace.storage.store import open_store
    from vivace.storage.store import verify as compare

    store = open_store(folder)
    if verify:
        compare(store)
    kinds: dict[str, int] = {}
    for name, bundle in store.bundles.items():
        kind = name if name == "resident" else name.split(".")[2]
        kinds[kind] = kinds.get(kind, 0) + bundle.num_bytes
    parts = [(bundle.name, part) for bundle in store.bundles.values() for part in bundle.parts]
    return {
        "folder": str(folder),
        "model_type": read_json(folder / "config.json")["model_type"],
        "layout": store.layout,
        "dtypes": [_dtype_name(store.dtype)],
        "bytes": store.num_bytes,
        **{f"bytes_{kind}": num_bytes for kind, num_bytes in kinds.items()},
        "bundles": len(store.bundles),
        "verified": verify,
        "layers": store.config.num_layers,
        "width": store.config.width,
        "ffn_width": store.config.ffn_width,
        "base_hash": store.base,
        "config": asdict(store.config),
        "tensors": [
            {"name": f"{name}: {part.name}", "dtype": _dtype_name(store.dtype), "shape": list(part.shape)}
            for name, part in parts
        ],
    }


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that are shown about an adapter.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    from vivace.checkpoint.adapters import load_adapter
    from vivace.checkpoint.lora_config import is_lora

    if is_lora(folder):
        return _lora_facts(folder)
    written, weights = load_adapter(folder)
    return {
        "folder": str(folder),
        "kind": written["kind"],
        **_size(weights),
        **_counted(written["kind"], weights),
        "base_hash": written["base_hash"],
        "plan": written["plan"],
        "config": written["config"],
        "tensors": _list(weights),
    }


def _lora_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that are shown about a LoRA of PEFT."""
    from vivace.checkpoint.files import read_metadata, read_tensors
    from vivace.checkpoint.lora_config import read_settings
    from vivace.checkpoint.peft import BASE, TENSORS

    settings, weights = read_settings(folder), read_tensors(folder / TENSORS)
    return {
        "folder": str(folder),
        "kind": "lora",
        **_size(weights),
        "base_hash": read_metadata(folder / TENSORS).get(BASE),
        "base_name": settings.base_name,
        "rank": settings.rank,
        "alpha": settings.alpha,
        "targets": settings.targets,
        "more_than_a_lora": [*settings.extras, *(["use_dora = true"] if settings.use_dora else [])],
        "tensors": _list(weights),
    }


def _size(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return number of parameters, bytes and dtypes of some tensors."""
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "dtypes": sorted({_dtype(tensor) for tensor in weights.values()}),
    }


def _counted(kind: str, weights: dict[str, Tensor]) -> dict[str, int]:
    """Count the weights of speculative streaming as its paper does, with the low-rank adapters apart from the
    others.
    """
    if kind != "multistream":
        return {}
    own = sum(tensor.numel() for name, tensor in weights.items() if name == "embeddings" or name.startswith("pruner."))
    return {
        "embeddings_pruner": own,
        "low_rank_adapters": sum(tensor.numel() for tensor in weights.values()) - own,
    }


def _list(weights: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor."""
    return [{"name": name, "dtype": _dtype(t), "shape": list(t.shape)} for name, t in sorted(weights.items())]


def _dtype(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return _dtype_name(tensor.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _plain(name: str, value: Any) -> str:
    """Format a value for people."""
    match name, value:
        case _, int() if name.startswith("bytes"):
            return format_bytes(value)
        case "parameters", int():
            return f"{value / 1e6:.1f} million"
        case "heads", [queries, keys]:
            return f"{queries} query, {keys} key/value"
        case _, list():
            return ", ".join(map(str, value)) or "none"
        case _, dict():
            return ", ".join(
                f"{key}={item:.2f}" if isinstance(item, float) else f"{key}={item}" for key, item in value.items()
            )
    return str(value)

"""The wide twin: a k times wider model that computes the same function.

A small model fits a processor's cache and says little about a user's model, which does not. Widening
repeats every channel k times and rescales what sums over them (function-preserving widening in the manner
of Net2Net, Chen et al. 2016, arXiv:1511.05641): same text, same acceptance of drafts, k^2 times the weight
bytes. It is a measuring instrument and says so wherever its results stand.

    residual h' = (h, ..., h)           norm weights repeated; the mean square is unchanged
    y = W x  ->  y' = (y, ..., y)       W' = W repeated in rows and columns, divided by k
    heads, feed-forward units           repeated, with their outputs' columns divided by k
    routers of mixtures                 repeated in columns, divided by k: as many experts, each of them wider
    low-rank terms of adapters          ranks stay, as a recipe's do whatever the width of the model
    head                                repeated in columns, divided by k; never tied to the embedding, which is not
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash, load_adapter, write_adapter
from vivace.checkpoint.files import INDEX, OWN_DRAFT, read_json, resolve, staged, tensor_paths
from vivace.checkpoint.load import load_decoder, put
from vivace.checkpoint.save import forget_shards, write_decoder
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError

_WIDTHS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "moe_intermediate_size"),
)


def widen_checkpoint(source: str | Path, out: str | Path, factor: int) -> Path:
    """Write a copy of a checkpoint and its adapters whose widths are ``factor`` times as large.

    Args:
        source: directory or Hub id of a model with rotary positions and RMS norms before each half.
        out: directory to write.
        factor: k; a power of two keeps every scaled weight exact.

    Raises:
        ConfigError: a factor below 2, or ``out`` is the source.
        UnsupportedError: a model that has other parts.
        CheckpointError: the disk is full; what was there is as it was.
    """
    folder = resolve(source)
    if factor < 2:
        raise ConfigError(f"the factor must be at least 2, found {factor}")
    if Path(out).resolve() == folder.resolve():
        raise ConfigError(f"{out} is the model itself; name another folder for its twin")
    narrow = load_decoder(folder, device="cpu")
    wide = widen(narrow, factor)
    raw = read_json(folder / "config.json")
    head_dim = wide.config.head_dim
    scaled = {key: raw[key] * factor for key in _WIDTHS if raw.get(key) is not None}
    target = Path(out)
    with staged(target) as place:
        write_decoder(wide, place, {**raw, **scaled, "head_dim": head_dim, "tie_word_embeddings": False})
        _copy_extras(folder, place)
        adapters = [path.parent for path in _adapters(folder) if _has_twin(read_json(path))]
        base = base_hash(place) if adapters else ""  # reads all weights, so once
        for adapter in adapters:
            _widen_adapter(adapter, place / "adapters" / adapter.name, base, narrow.config, factor)
    forget_shards(target)
    return target


def widen(decoder: Decoder, factor: int) -> Decoder:
    """The wide twin of a decoder, in its dtype."""
    config = decoder.config
    _check(config)
    wide_config = replace(
        config,
        width=config.width * factor,
        num_heads=config.num_heads * factor,
        num_kv_heads=config.num_kv_heads * factor,
        ffn_width=config.ffn_width * factor,
        moe=None if config.moe is None else replace(config.moe, expert_width=config.moe.expert_width * factor),
        tied_head=False,
    )
    with torch.device("meta"):
        wide = Decoder(wide_config)
    for name, value in decoder.named_parameters():
        put(wide, name, _widened(name, value.detach(), config, factor))
    if decoder.lm_head is None:
        put(wide, "lm_head.weight", _widened("lm_head.weight", decoder.embedding.detach(), config, factor))
    return wide.requires_grad_(False).eval()


def _check(config: ModelConfig) -> None:
    plain = (
        config.norm == "rms"
        and config.norm_placement == "pre"
        and config.norm_offset == 0
        and config.qk_norm in ("none", "head")
        and config.positions == "rotary"
        and config.gated
    )
    if not plain:
        raise UnsupportedError(
            "only models with rotary positions, gated feed-forwards and RMS norms before each half can be widened"
        )


def _widened(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One parameter of the wide twin."""
    if name == "embedding":
        return value.repeat(1, k)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value.clone()
    if name == "lm_head.weight" or name.endswith(".router.weight"):
        return value.repeat(1, k) / k
    if name == "lm_head.bias":
        return value.clone()
    parts = _outputs(name, config)
    blocks = value.split(parts) if parts else (value,)
    repeated = [block.repeat(k) if block.dim() == 1 else block.repeat(k, k) / k for block in blocks]
    return torch.cat(repeated)


def _outputs(name: str, config: ModelConfig) -> list[int] | None:
    """Sizes of what a fused matrix holds, each widened by itself."""
    if ".qkv." in name:
        key = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, key, key]
    if ".feed_forward.up." in name:
        return [config.ffn_width, config.ffn_width]
    if ".experts." in name and ".up." in name:
        assert config.moe is not None
        return [config.moe.expert_width, config.moe.expert_width]
    return None


def _copy_extras(source: Path, target: Path) -> None:
    """Tokenizer, templates, generation settings, a draft model: whatever is neither configuration nor weights."""
    rewritten = {"config.json", INDEX, *(path.name for path in tensor_paths(source).values())}
    for path in source.iterdir():
        if path.is_file() and path.name not in rewritten:
            shutil.copyfile(path, target / path.name)
    if (source / OWN_DRAFT).is_dir():
        shutil.copytree(source / OWN_DRAFT, target / OWN_DRAFT)


def without_twin(source: str | Path) -> tuple[str, ...]:
    """Names of a checkpoint's adapters that no way is known to widen; its twin goes without them."""
    return tuple(path.parent.name for path in _adapters(resolve(source)) if not _has_twin(read_json(path)))


def _has_twin(found: dict[str, Any]) -> bool:
    """Whether it is known how. A linear router reads rows of the model's width under a name that others have too."""
    if found["kind"] == "dynamic":
        return bool(found["config"]["router"]["kind"] in ("arla", "mlp"))
    return found["kind"] in _TERMS


def _adapters(folder: Path) -> list[Path]:
    """Where the adapters beside a checkpoint are described."""
    return sorted((folder / "adapters").glob("*/config.json"))


def _widen_adapter(source: Path, target: Path, base: str, config: ModelConfig, k: int) -> None:
    found, tensors = load_adapter(source)
    widened = _TERMS[found["kind"]]
    write_adapter(
        target, found | {"base_hash": base}, {name: widened(name, t, config, k) for name, t in tensors.items()}
    )


def _accelerator_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of an accelerated residual, of an exit, or of terms on the model.

    Ranks stay: the recipes give the same ones to models of any width.
    """
    kind = name.partition(".")[0]
    if kind == "down":
        return value.repeat(1, 1, k) / k
    if kind == "up":
        return value.repeat(1, k, 1)
    if value.dim() == 1:
        return value.repeat(k)
    return value.repeat(k, k) / k


def _foresight_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of what foresees experts; scales (N, E) are per layer and component, routers' parts (..., X, E)."""
    if name in ("near", "far"):
        return value.repeat(*(1,) * (value.dim() - 1), k) / k
    if name.startswith("forecast."):
        joined = name == "forecast.down"  # of a residual and an embedding
        return torch.cat([half.repeat(1, k) / k for half in value.chunk(2, 1)], 1) if joined else value.clone()
    return value.repeat(1, k) if name.endswith("scale") else _accelerator_term(name, value, config, k)


def _exit_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of gates and their router, whose latents stay as wide as they are."""
    if name.startswith("gates."):
        return _foresight_term(name.removeprefix("gates."), value, config, k)
    if name.startswith("router.inner."):
        return value.repeat(k, 1) / k
    return value.repeat(1, k, 1) / k if name.startswith("router.down.") else value.clone()


def _stream_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of speculative streams; ranks stay."""
    if name == "embeddings":
        return value.repeat(1, k)
    if name == "pruner.down":
        return value.repeat(1, k) / k
    if name in ("final", "decided", "rotation.values"):
        return value.repeat(1, k, k) / k
    return value.repeat(k, 1) if name == "pruner.up" else _accelerator_term(name, value, config, k)


def _medusa_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of Medusa's heads, (heads, out, E)."""
    return (value.repeat(1, 1, k) if name == "output" else value.repeat(1, k, k)) / k


def _eagle_term(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of a feature drafter: what joins a feature and an embedding, and a layer as the model's are."""
    if name == "join":
        return torch.cat([half.repeat(k, k) / k for half in value.chunk(2, 1)], 1)
    return _widened(name.removeprefix("body."), value, config, k)


_TERMS: dict[str, Callable[[str, Tensor, ModelConfig, int], Tensor]] = {
    "multirate": _accelerator_term,
    "dynamic": _exit_term,
    "foresight": _foresight_term,
    "multistream": _stream_term,
    "medusa": _medusa_term,
    "deed": _accelerator_term,
    "eagle": _eagle_term,
    "uno": _accelerator_term,
}
"""By kind of adapter."""

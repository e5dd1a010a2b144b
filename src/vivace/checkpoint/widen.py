"""Widening a model: a copy that is k times as wide and computes the same function.

A small model fits into a processor's cache, so its speed tells little about larger models, which do not. Widening
repeats every channel k times and rescales the weights that sum over them (function-preserving widening in the manner
of Net2Net, Chen et al. 2016, arXiv:1511.05641): the wide copy writes the same text, accepts the same drafts and reads
k^2 times as many bytes of weights. It serves measurements only, and results that use it name it.

    residual h' = (h, ..., h)           norm weights repeated; the mean square is unchanged
    y = W x  ->  y' = (y, ..., y)       W' = W repeated in rows and columns, divided by k
    heads, feed-forward units           repeated, with their outputs' columns divided by k
    routers of mixtures                 repeated in columns, divided by k: as many experts, each of them wider
    low-rank terms of adapters, LoRAs   ranks are kept
    head                                repeated in columns, divided by k; never tied to the embedding, which is
                                        repeated without division
    layer norms                         weights and biases repeated; mean and variance are unchanged
    learned and relative positions      repeated: the former in columns, the latter by heads

Behind an encoder a head may be tied, since files of these families have no other. Let e and s be how much smaller the
factors on embeddings and on what enters the head become (both follow the width). Then the embedding is multiplied by e,
and the norm before the head by s / (k e), or a head of its own by s / k. Where one of the factors follows the width,
this is exact if k is a power of four. Sinusoids do not repeat, so models with them have no twin.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash, load_adapter, write_adapter
from vivace.checkpoint.draft_vocabulary import FILE as VOCABULARY
from vivace.checkpoint.draft_vocabulary import has_vocabulary
from vivace.checkpoint.families import family_of
from vivace.checkpoint.files import INDEX, OWN_DRAFT, RECOVERY, read_json, require_other, resolve, tensor_paths
from vivace.checkpoint.load import load_decoder, put, read_config
from vivace.checkpoint.lora_config import DRAFTING, is_lora
from vivace.checkpoint.peft import ModuleTable, load_lora, save_lora
from vivace.checkpoint.save import staged_checkpoint, write_decoder
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError

_WIDTHS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "moe_intermediate_size"),
    *("d_model", "d_ff", "num_heads"),
    *(f"{side}_{what}" for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")),
)
"""Keys of ``config.json`` that are multiplied by k."""
LORAS = "loras"
"""Folder of the wide copies of LoRAs, in that of the twin."""


class AdapterTwin(NamedTuple):
    """How the weights of one method are widened."""

    widen: Callable[[str, Tensor, ModelConfig, int], Tensor]
    """Maps (name, tensor, narrow model, factor) to the tensor for the wide model."""
    is_known: Callable[[Mapping[str, Any]], bool]
    """Returns whether weights of this configuration can be widened."""


def widen_checkpoint(
    source: str | Path,
    out: str | Path,
    factor: int,
    twins: Mapping[str, AdapterTwin],
    *,
    loras: Mapping[str, Path] | None = None,
    ignored: Sequence[str] = (),
) -> Path:
    """Write a copy of a checkpoint and its adapters, whose widths are ``factor`` times as large.

    A recovery adapter is one of these adapters.

    Args:
        source: directory or Hub id of a model with rotary positions and RMS norms before attention and feed-forward, or
            of an encoder-decoder without sinusoids.
        out: directory to write.
        factor: k; with a power of two (behind an encoder: of four) every rescaled weight is exact.
        twins: how to widen adapters, by the kind in their ``config.json``.
        loras: LoRAs of the model, widened into ``out/loras/NAME`` with the draft weights that were trained over them.
        ignored: unknown keys of config.json that are read as if they were not there, and not written.

    Raises:
        ConfigError: the factor is less than 2, ``out`` is the source, or a folder has no LoRA or no plain name.
        UnsupportedError: the model or a LoRA has other parts.
        MismatchError: a LoRA is of another model.
        CheckpointError: the disk is full; ``out`` is left as it was.
    """
    folder = resolve(source)
    if factor < 2:
        raise ConfigError(f"the factor must be at least 2, found {factor}")
    require_other(out, folder, "another folder for its twin")
    for name, place in (loras or {}).items():
        if not is_lora(place):
            raise ConfigError(f"{place} is no LoRA; draft weights in the model's folder are widened with it")
        if Path(name).name != name:
            raise ConfigError(f"a LoRA's name is that of its folder in the twin, found {name!r}")
    narrow = load_decoder(folder, device="cpu", ignored=ignored, reads_sources=True)
    wide = widen(narrow, factor)
    raw = read_config(folder, ignored)
    scaled = {key: raw[key] * factor for key in _WIDTHS if raw.get(key) is not None}
    if wide.encoder is None:
        scaled |= {"head_dim": wide.config.head_dim, "tie_word_embeddings": False}
    target = Path(out)
    with staged_checkpoint(target) as place:
        write_decoder(wide, place, {**raw, **scaled})
        _copy_extras(folder, place)
        adapters = _with_twin(folder / "adapters", twins)
        worn = {place / LORAS / name: lora for name, lora in (loras or {}).items()}
        if is_lora(recovery := folder / "adapters" / RECOVERY):
            worn[place / "adapters" / RECOVERY] = recovery
        base = base_hash(place) if adapters or worn else ""  # reads all weights, so once
        for adapter in adapters:
            _widen_adapter(adapter, place / "adapters" / adapter.name, base, narrow.config, factor, twins)
        names = family_of(raw).names
        tables = ModuleTable(names, narrow.config), ModuleTable(names, wide.config)
        for own, lora in worn.items():
            read = load_lora(lora, tables[0], base_hash(folder))
            save_lora(
                own, {site: _widen_factors(*pair, factor) for site, pair in read.factors.items()}, tables[1], base=base
            )
            for drafts in _with_twin(lora / DRAFTING, twins):
                _widen_adapter(drafts, own / DRAFTING / drafts.name, base, narrow.config, factor, twins)
    return target


def widen(decoder: Decoder, factor: int) -> Decoder:
    """Return the wide copy of a decoder, in its dtype."""
    config = decoder.config
    _check(config)
    wide_config = _widened(config, factor)
    with torch.device("meta"):
        wide = Decoder(wide_config)
    for name, value in decoder.named_parameters():
        inner = name.removeprefix("encoder.")
        assert inner == name or config.encoder is not None
        narrow = config if inner == name or config.encoder is None else config.encoder
        put(wide, name, widen_parameter(inner, value.detach(), narrow, factor))
    wide.tie()
    if config.encoder is not None:
        _rescale(wide, config, wide_config, factor)
    elif decoder.lm_head is None:
        put(wide, "lm_head.weight", widen_parameter("lm_head.weight", decoder.embedding.detach(), config, factor))
    return wide.requires_grad_(False).eval()


def _widened(config: ModelConfig, factor: int) -> ModelConfig:
    """Return the configuration of the wide copy of a stack."""
    width, is_alone = config.width * factor, config.encoder is None and config.is_causal
    embedding_follows, head_follows = (
        not is_alone and scale == config.width**power
        for scale, power in ((config.embedding_scale, 0.5), (config.head_scale, -0.5))
    )
    return replace(
        config,
        width=width,
        num_heads=config.num_heads * factor,
        num_kv_heads=config.num_kv_heads * factor,
        ffn_width=config.ffn_width * factor,
        moe=None if config.moe is None else replace(config.moe, expert_width=config.moe.expert_width * factor),
        tied_head=config.tied_head and not is_alone,
        embedding_scale=width**0.5 if embedding_follows else config.embedding_scale,
        head_scale=width**-0.5 if head_follows else config.head_scale,
        encoder=None if config.encoder is None else _widened(config.encoder, factor),
    )


@torch.no_grad()
def _rescale(wide: Decoder, narrow: ModelConfig, config: ModelConfig, factor: int) -> None:
    """Make up for factors that follow the width, and for a head that sums over ``factor`` copies (module's docstring).

    A norm of sums after the last layer is a norm before the head, since nothing else reads what it writes.
    """
    embedding = narrow.embedding_scale / config.embedding_scale
    head = narrow.head_scale / config.head_scale
    wide.embedding.mul_(embedding)
    if wide.lm_head is not None:
        wide.get_parameter("lm_head.weight").mul_(head)  # divided by the factor already
        return
    last = "final_norm" if config.final_norm else f"layers.{config.num_layers - 1}.ffn_post_norm"
    for parameter in wide.get_submodule(last).parameters():
        parameter.mul_(head / (factor * embedding))


def _check(config: ModelConfig) -> None:
    """Refuse a model with parts for which no widening is known."""
    if config.encoder is not None:
        if config.positions == "sinusoid":
            raise UnsupportedError(
                "models with sinusoids for positions cannot be widened: those of a width do not repeat"
            )
        return
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
            "only encoder-decoders, and models with rotary positions, gated feed-forwards and RMS norms before each "
            "half, can be widened"
        )


def widen_parameter(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one parameter of a decoder by ``k``, given its name and the narrow model's ``config``."""
    if name in ("embedding", "position_embedding", "relative.weight"):
        return value.repeat(1, k)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value.clone()
    if name == "lm_head.weight" or name.endswith(".router.weight"):
        return value.repeat(1, k) / k
    if name in ("lm_head.bias", "logits_bias"):
        return value.clone()
    parts = _outputs(name, config)
    blocks = value.split(parts) if parts else (value,)
    repeated = [block.repeat(k) if block.dim() == 1 else block.repeat(k, k) / k for block in blocks]
    return torch.cat(repeated)


def _outputs(name: str, config: ModelConfig) -> list[int] | None:
    """Return the row counts of the matrices fused into one parameter, each of which is widened by itself; None if it is
    one.
    """
    if ".qkv." in name:
        key = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, key, key]
    if ".cross.kv." in name:
        return [config.num_kv_heads * config.head_dim] * 2
    if ".feed_forward.up." in name:
        return [config.ffn_width] * (2 if config.gated else 1)
    if ".experts." in name and ".up." in name:
        assert config.moe is not None
        return [config.moe.expert_width, config.moe.expert_width]
    return None


def _copy_extras(source: Path, target: Path) -> None:
    """Copy all files that are neither configuration nor weights (tokenizer, templates, ...), and the draft model."""
    rewritten = {"config.json", INDEX, *(path.name for path in tensor_paths(source).values())}
    for path in source.iterdir():
        if path.is_file() and path.name not in rewritten:
            shutil.copyfile(path, target / path.name)
    if (source / OWN_DRAFT).is_dir():
        shutil.copytree(source / OWN_DRAFT, target / OWN_DRAFT)


def without_twin(
    source: str | Path, twins: Mapping[str, AdapterTwin], loras: Mapping[str, Path] | None = None
) -> tuple[str, ...]:
    """Return the names of adapters that cannot be widened, of a checkpoint and over its LoRAs (``NAME/drafting/...``);
    the wide copy does not have them.
    """
    places = {"": resolve(source) / "adapters"} | {
        f"{name}/{DRAFTING}/": lora / DRAFTING for name, lora in (loras or {}).items()
    }
    left_out = {
        prefix: sorted({*_adapters(place)}.difference(_with_twin(place, twins))) for prefix, place in places.items()
    }
    return tuple(prefix + path.name for prefix, paths in left_out.items() for path in paths)


def _with_twin(place: Path, twins: Mapping[str, AdapterTwin]) -> list[Path]:
    """Return the adapters in a folder that can be widened."""
    written = {path: read_json(path / "config.json") for path in _adapters(place)}
    return [
        path
        for path, found in written.items()
        if found["kind"] in twins and twins[found["kind"]].is_known(found["config"])
    ]


def _adapters(place: Path) -> list[Path]:
    """Return the folders of adapters in a folder."""
    return sorted(path.parent for path in place.glob("*/config.json"))


def _widen_factors(down: Tensor, up: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Widen the factors of a LoRA at one site, down (R, in) and up (out, R); the rank is kept."""
    return down.repeat(1, k) / k, up.repeat(k, 1)


def _widen_adapter(
    source: Path, target: Path, base: str, config: ModelConfig, k: int, twins: Mapping[str, AdapterTwin]
) -> None:
    """Write the wide copy of an adapter."""
    found, tensors = load_adapter(source)
    if has_vocabulary(source):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / VOCABULARY, target / VOCABULARY)
    widened = twins[found["kind"]].widen
    write_adapter(
        target, found | {"base_hash": base}, {name: widened(name, t, config, k) for name, t in tensors.items()}
    )


def widen_low_rank(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Widen one tensor of a method that adds low-rank terms to the model; the ranks are kept.

    Args:
        name: name of the tensor; its first part "down" (n, R, E) or "up" (n, E, R) tells which factor it is.
        value: the tensor.
        config: configuration of the narrow model.
        k: how many times as wide the model becomes.
    """
    kind = name.partition(".")[0]
    if kind == "down":
        return value.repeat(1, 1, k) / k
    if kind == "up":
        return value.repeat(1, k, 1)
    if value.dim() == 1:
        return value.repeat(k)
    return value.repeat(k, k) / k

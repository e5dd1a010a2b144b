"""Turning a dense model into a mixture of experts: each feed-forward is copied into several, behind a new router.

Sparse upcycling (Komatsuzaki et al. 2023, arXiv:2212.05055). The probabilities of the chosen experts sum to one, so
without noise the mixture computes what the dense model computes, whatever its router chooses. Noise lets the copies
become different when they are trained (``vivace train upcycle``). The result is a Mixtral checkpoint, which
transformers reads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.families import translate
from vivace.checkpoint.files import INDEX, require_other, resolve, tensor_paths
from vivace.checkpoint.load import load_decoder, put, read_config
from vivace.checkpoint.save import staged_checkpoint, write_decoder
from vivace.core.config import ModelConfig, MoeConfig
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError, shown

_EXPERT = re.compile(r"(layers\.\d+\.feed_forward\.)experts\.\d+\.(.*)")
_DENSE_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")
"""Keys of the dense family that Mixtral's configuration does not have; values of them that matter are refused."""
ROUTER_STD = 0.02
"""Standard deviation of the weights of new routers."""


def upcycle_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    num_experts: int = 16,
    top_k: int = 2,
    noise: float = 0.1,
    seed: int = 0,
    ignored: Sequence[str] = (),
) -> Path:
    """Write the mixture of experts that a dense checkpoint becomes.

    Args:
        source: directory or Hub id of a Llama or Mistral model.
        out: directory to write.
        num_experts: X, the number of copies of each feed-forward.
        top_k: number of experts that each token is sent to.
        noise: standard deviation of the noise added to each copy, as a multiple of that of its weights.
        seed: seed of routers and noise.
        ignored: unknown keys of config.json that are read as if they were not there, and not written.

    Raises:
        ConfigError: the numbers do not describe a mixture, or ``out`` is the source.
        UnsupportedError: Mixtral's configuration cannot describe the model.
        CheckpointError: the disk is full; ``out`` is left as it was.
    """
    folder, target = resolve(source), Path(out)
    if not 1 <= top_k < num_experts or not 0 <= noise < inf:
        raise ConfigError(
            "a mixture needs 1 <= top_k < num_experts and noise >= 0, finite, found "
            f"{top_k}, {num_experts} and {noise:g}"
        )
    if not -(1 << 63) <= seed < 1 << 63:
        raise ConfigError(f"seed must be an integer of 64 bits, found {shown(seed)}")
    require_other(out, folder, "another folder for the mixture")
    raw = _mixtral(read_config(folder, ignored), num_experts, top_k)
    dense = load_decoder(folder, device="cpu", ignored=ignored)
    mixture = upcycle(dense, num_experts, top_k, noise, seed)
    if translate(raw) != mixture.config:
        raise UnsupportedError("this model has parts that no Mixtral has (biases, other norms); it cannot be upcycled")
    with staged_checkpoint(target) as place:
        write_decoder(mixture, place, raw)
        _copy_extras(folder, place)
    return target


def upcycle(dense: Decoder, num_experts: int, top_k: int, noise: float, seed: int = 0) -> Decoder:
    """Return the mixture of experts that a decoder becomes, in its dtype."""
    config = dense.config
    moe = MoeConfig(num_experts, top_k, config.ffn_width, normalise=True)
    with torch.device("meta"):
        mixture = Decoder(replace(config, moe=moe))
    generator = torch.Generator().manual_seed(seed)
    for name, value in _parameters(dense, mixture, noise, generator):
        put(mixture, name, value)
    return mixture.requires_grad_(False).eval()


def _parameters(
    dense: Decoder, mixture: Decoder, noise: float, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter of the mixture."""
    known = dict(dense.named_parameters())
    for name, empty in list(mixture.named_parameters()):
        found = _EXPERT.fullmatch(name)
        if found:
            value = known[found[1] + found[2]].detach()
            added = torch.randn(value.shape, generator=generator) * (noise * float(value.float().std()))
            yield name, (value + added).to(value.dtype)
        elif name.endswith("router.weight"):
            yield name, (torch.randn(empty.shape, generator=generator) * ROUTER_STD).to(dense.dtype)
        else:
            yield name, known[name].detach().clone()


def _mixtral(raw: Mapping[str, Any], num_experts: int, top_k: int) -> dict[str, Any]:
    """Return the ``config.json`` of the mixture.

    Raises:
        UnsupportedError: the layers of this family differ from Mixtral's.
    """
    if raw.get("model_type") not in ("llama", "mistral"):
        raise UnsupportedError(f"only Llama and Mistral models can be upcycled, found {raw.get('model_type')!r}")
    config: ModelConfig = translate(raw)
    kept = {key: value for key, value in raw.items() if key not in _DENSE_ONLY}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": config.head_dim,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
    }


def _copy_extras(source: Path, target: Path) -> None:
    """Copy tokenizer, templates and generation settings; adapters belong to the dense model and are not copied."""
    rewritten = {"config.json", INDEX, *(path.name for path in tensor_paths(source).values())}
    for path in source.iterdir():
        if path.is_file() and path.name not in rewritten and path.name != "README.md":
            shutil.copyfile(path, target / path.name)

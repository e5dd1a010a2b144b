"""A Mixtral checkpoint as GGUF in bfloat16, for llama.cpp beside our rows: just enough for a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from vivace.checkpoint.gguf.blocks import find_kind
from vivace.checkpoint.gguf.file import Entry, Value, write_gguf
from vivace.checkpoint.gguf.names import gguf_names
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder


def write_mixture(folder: Path, out: Path) -> int:
    """Write a Mixtral checkpoint as GGUF in bfloat16, experts of a layer as one tensor, and return its size.

    Our ``convert --gguf`` writes dense Llamas only; this knows just enough for the benchmark, and ids instead of text.
    """
    model = load_decoder(folder, device="cpu")
    c, moe, kind = model.config, model.config.moe, find_kind("bf16")
    assert moe is not None
    keys: dict[str, Value] = {
        "general.architecture": "llama",
        "general.file_type": kind.file_code,
        "tokenizer.ggml.model": "none",
        "llama.vocab_size": c.vocab_size,
        "llama.context_length": c.max_positions,
        "llama.embedding_length": c.width,
        "llama.block_count": c.num_layers,
        "llama.feed_forward_length": moe.expert_width,
        "llama.attention.head_count": c.num_heads,
        "llama.attention.head_count_kv": c.num_kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
        "llama.rope.dimension_count": c.head_dim,
        "llama.rope.freq_base": c.rope(0).theta,
        "llama.expert_count": moe.num_experts,
        "llama.expert_used_count": moe.top_k,
    }
    return write_gguf(out, keys, list(_entries(model)))


def _entries(model: Decoder) -> Iterator[Entry]:
    """Yield the tensors of a mixture under llama.cpp's names."""
    bf16, f32 = find_kind("bf16"), find_kind("f32")
    experts: dict[str, list[torch.Tensor]] = {}
    for name, value in model.named_parameters():
        place = name.split(".")
        if "experts" in place:
            gate_up = value.chunk(2) if place[-2] == "up" else (value,)
            for stem, part in zip(("gate", "up") if len(gate_up) > 1 else ("down",), gate_up, strict=True):
                experts.setdefault(f"blk.{place[1]}.ffn_{stem}_exps.weight", []).append(part)
        elif place[-2:] == ["router", "weight"]:
            name = f"blk.{place[1]}.ffn_gate_inp.weight"
            yield Entry(name, tuple(value.shape), f32, partial(torch.Tensor.float, value))
        else:
            yield from _dense(name, value, model)
    for name, parts in experts.items():
        yield Entry(name, (len(parts), *parts[0].shape), bf16, partial(torch.stack, parts))


def _dense(name: str, value: torch.Tensor, model: Decoder) -> Iterator[Entry]:
    """Yield what is not of a mixture; heads of queries and keys are reordered as llama.cpp rotates them."""
    c = model.config
    rows = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    is_qkv = name.endswith("qkv.weight")
    parts = value.split([count * c.head_dim for count in rows]) if is_qkv else (value,)
    for index, (target, part) in enumerate(zip(gguf_names(name, len(parts)), parts, strict=True)):
        turned = part
        if is_qkv and index < 2:
            turned = part.view(rows[index], 2, -1, c.width).transpose(1, 2).reshape(part.shape)
        kind = find_kind("bf16" if part.ndim > 1 else "f32")
        yield Entry(target, tuple(part.shape), kind, partial(torch.Tensor.contiguous, turned))

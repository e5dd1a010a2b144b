"""Other programs that decode with LoRAs, on the prompts and LoRAs of ``benchmarks.adapters``: PEFT and llama.cpp."""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from vivace.checkpoint.gguf.blocks import find_kind
from vivace.checkpoint.gguf.file import Entry, write_gguf
from vivace.checkpoint.peft import TENSORS
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.errors import VivaceError
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.llamacpp import LlamaCppPeer, enter_llama_cpp

LLAMA_CPP_WEIGHTS = {"bf16": "llama.cpp", "int8": "llama.cpp-q8_0", "q4": "llama.cpp-q4_0", "lut3": "llama.cpp-q3_k_s"}
"""What llama.cpp runs beside a format of ours: the nearest that it has."""
GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
"""Llama's matrices in PEFT's files and in llama.cpp's."""
_FACTOR = re.compile(r"layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])\.weight$")


def peft_speed(model: Path, loras: Mapping[str, Path], prompts: Sequence[str], asked: argparse.Namespace) -> float:
    """Return the tokens per second of PEFT's mixed batch, the first token's time taken away."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    names = list(loras)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    mixed = PeftModel.from_pretrained(base, loras[names[0]], adapter_name=names[0], autocast_adapter_dtype=False)
    for name in names[1:]:
        mixed.load_adapter(loras[name], adapter_name=name, autocast_adapter_dtype=False)
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            mixed.eval().generate(
                **batch, adapter_names=names, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
        return time.perf_counter() - began

    seconds(2)
    later = len(names) * (asked.tokens - 1)
    speeds: list[float] = [later / (seconds(asked.tokens) - seconds(1)) for _ in range(asked.repeats)]
    return statistics.median(speeds)


def write_lora_gguf(folder: Path, out: Path) -> None:
    """Write a PEFT LoRA of a Llama for llama.cpp, in float16.

    Queries and keys keep their order of rows, which llama.cpp has otherwise: the file is for timing only.
    """
    entries = []
    for name, value in load_file(folder / TENSORS).items():
        found = _FACTOR.search(name)
        if found is None:
            raise VivaceError(f"{folder}: {name} is no factor of a Llama's LoRA")
        layer, module, factor = found.groups()
        stem = f"blk.{layer}.{GGUF_NAMES[module]}.weight.lora_{factor.lower()}"
        entries.append(Entry(stem, tuple(value.shape), find_kind("f16"), value.float))
    rank = float(entries[0].shape[0])
    keys = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    write_gguf(out, {**keys, "adapter.lora.alpha": rank}, entries)


def llama_cpp_speeds(
    model: Path, weights: str, loras: Mapping[str, Path], prompts: Sequence[str], asked: argparse.Namespace
) -> dict[str, float]:
    """Return llama.cpp's tokens per second after the first tokens, by way; medians of repeats in turns.

    One request with and without a LoRA, all requests in one batch on the base, and each with its own LoRA one after
    another: sequences of one context wear the same LoRA, so requests with different ones cannot share a pass.
    """
    tokenizer = load_tokenizer(model)
    batch = [BenchmarkPrompt(prompt, tuple(tokenizer.encode(prompt))) for prompt in prompts]
    names = [LLAMA_CPP_WEIGHTS[weights]]
    (peer,) = enter_llama_cpp(names, model, batch, max_new_tokens=asked.tokens, batch_size=len(batch))
    endless = replace(peer, end_tokens=frozenset())
    with tempfile.TemporaryDirectory(prefix="vivace-gguf-") as place:
        for name, folder in loras.items():
            write_lora_gguf(folder, Path(place) / f"{name}.gguf")
            peer.engine.add_lora(Path(place) / f"{name}.gguf")
    ways: dict[str, list[tuple[list[BenchmarkPrompt], int | None]]] = {
        "one on the base": [(batch[:1], None)],
        "one with a LoRA": [(batch[:1], 0)],
        "all on the base": [(batch, None)],
        "one after another": [([prompt], number) for number, prompt in enumerate(batch)],
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(asked.repeats + 1):
        for way, calls in ways.items():
            found[way].append(_speed(endless, calls))
    return {way: statistics.median(each[1:]) for way, each in found.items()}


def _speed(peer: LlamaCppPeer, calls: Sequence[tuple[list[BenchmarkPrompt], int | None]]) -> float:
    """Answer batches, each with the LoRA of a number or with none, and return tokens per second."""
    num_tokens, seconds = 0, 0.0
    for batch, lora in calls:
        peer.engine.wear(lora)
        trial = peer.answer(batch)
        num_tokens += sum(map(len, trial.token_ids)) - trial.num_first_tokens
        seconds += trial.decode_s
    return num_tokens / seconds

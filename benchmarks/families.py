"""Time plain decoding of every model family beside transformers: ``python -m benchmarks.families --json FILE``.

Each family gets a checkpoint of about 30 million parameters with random weights, which transformers writes: its text
has no meaning and no end token, but reading the weights takes as long. Both engines answer the same prompts in turns,
as in ``vivace bench decode``; transformers runs in bfloat16 or in float32, whichever is faster here. ``--model DIR``
measures checkpoints that exist. ``--dtype`` stores them in another dtype (transformers then runs in that one or in
float32), ``--inside`` also measures ``custom_generate`` on transformers' model. Nothing else should run on the machine
meanwhile.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import vivace
from benchmarks.result_files import write_report
from vivace.core.cpu.span import NativeSpan
from vivace.evaluate.benchmark import BenchmarkPrompt, run_benchmark, summarise
from vivace.evaluate.others import watched_others
from vivace.evaluate.peers import Stopwatch, TransformersPeer, peer_systems
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem

PROMPT_TOKENS = 32

_SIZES: dict[str, Any] = {
    **{"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True},
}
_GEMMA: dict[str, Any] = {
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"sliding_window": 512},
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 352}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 512},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "phi3": {},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": {"num_key_value_heads": 8},
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 1024, "n_inner": 2048},
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "olmoe": _EXPERTS,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 352},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 352, "head_dim": 64},
}
"""What differs from the common sizes, by ``model_type``."""
_FOREIGN = {
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "opt": ("intermediate_size", "num_key_value_heads"),
}
"""Common sizes that a family spells another way."""


def make_random(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint of a family with random weights and no tokenizer."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    sizes = {name: value for name, value in _SIZES.items() if name not in _FOREIGN.get(family, ())}
    config = AutoConfig.for_model(family, **{**sizes, **SHAPES[family]})
    if family == "gpt2":
        config.max_position_embeddings = config.n_positions
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


class InsidePeer(TransformersPeer):
    """Our plain decoding inside transformers' ``generate``, over a model that transformers loaded."""

    def _arguments(self, watch: Stopwatch) -> dict[str, Any]:
        return {"stream": watch, "custom_generate": vivace.custom_generate, "method": "plain"}


def measure(
    folder: Path, *, prompts: int, tokens: int, repeats: int, dtype: str = "bfloat16", is_inside: bool = False
) -> dict[str, Any]:
    """Decode with both engines in turns; see the module."""
    engine = vivace.load(folder, dtype="auto" if dtype == "float16" else dtype)
    config, draw = engine.model.config, random.Random(0)
    texts = [tuple(draw.randrange(1, config.vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(prompts)]
    questions = [BenchmarkPrompt(list(ids), ids) for ids in texts]  # type: ignore[arg-type]  # no tokenizer: ids go in
    rivals, heat = peer_systems(["transformers"], folder, questions, max_new_tokens=tokens, device=torch.device("cpu"))
    systems: list[Any] = [MethodSystem("plain", engine, tokens), *rivals]
    if is_inside:
        kept = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        systems.append(InsidePeer("custom_generate", kept, tokens))
    with watched_others() as others:
        records = run_benchmark(systems, questions, repeats=repeats)
    backend = engine.model.backend
    return {
        "parameters": sum(size for size in _sizes_of(folder)),
        "kernels": engine.kernels.name,
        "is_span": isinstance(backend.span, NativeSpan),
        "is_chain": backend.chain is not None,
        "transformers_dtype": None if heat is None else heat.dtype,
        "others_cpu_share": others.cpu_share,
        "runs": [asdict(run) for run in summarise(records, rivals[0].name)],
    }


def _sizes_of(folder: Path) -> Sequence[int]:
    """Return the number of weights of every tensor of a checkpoint."""
    from safetensors import safe_open

    sizes = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            sizes += [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118
    return sizes


def main() -> None:
    """Measure every family and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(SHAPES), help="values of model_type; empty for none")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a checkpoint that exists")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--inside", action="store_true", help="measure custom_generate as well")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    how = {"prompts": asked.prompts, "tokens": asked.tokens, "repeats": asked.repeats, "dtype": asked.dtype}
    report: dict[str, Any] = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": how, "models": {}}
    with TemporaryDirectory() as place:
        made = {
            name: make_random(name, Path(place, name), getattr(torch, asked.dtype))
            for name in asked.families.split(",")
            if name
        }
        for name, folder in {**made, **{folder.name: folder for folder in asked.model}}.items():
            found = report["models"][name] = measure(folder, **how, is_inside=asked.inside)
            ours, theirs, *inside = found["runs"]
            print(
                f"{name}: {ours['tokens_per_s']:.1f} tokens/s, transformers {theirs['tokens_per_s']:.1f} "
                f"({found['transformers_dtype']}), {ours['speedup']:.2f}x"
                + "".join(f", custom_generate {each['tokens_per_s']:.1f}" for each in inside),
                flush=True,
            )
    if asked.json is not None:
        write_report(asked.json, report)


if __name__ == "__main__":
    main()

"""Time plain decoding in every weight format beside transformers and llama.cpp, on the same weights, in one run.

Run it on a machine that does nothing else; it needs the extra ``llamacpp``:

    python -m benchmarks.peers --models shipped,twin,100M,360M --out peers.json

There are two tables for each model. *Decoding*: all engines answer the same prompts in turns, as in ``vivace bench
decode``. *Passes*: one pass over k rows with 128 tokens in the cache, all engines in turns, llama.cpp with logits for
all rows. Speculation pays for the pass over eight rows, so its time is shown in milliseconds and not only relative to
k = 1.

The models of 100 and 360 million parameters are Llamas with random weights: their text has no meaning and no end token,
but reading them takes as long. They are made once, in ``--folder``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks.result_files import write_report
from vivace.checkpoint.widen import widen_checkpoint
from vivace.engine import SHIPPED, Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, Record, run_benchmark, summarise
from vivace.evaluate.llamacpp import LLAMA_CPP, LlamaCppPeer, llama_cpp_passes
from vivace.evaluate.peers import peer_systems
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes, passes_over, read_bandwidth
from vivace.evaluate.systems import MethodSystem
from vivace.methods.composition import twins
from vivace.prompts import packaged_prompts

ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows that are measured."""
CONTEXT = 128
"""Number of tokens in the cache."""
PROMPT_WORDS = 48
PEERS = ("transformers", *LLAMA_CPP)

SHAPES: dict[str, dict[str, int]] = {
    "100M": {
        **{"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "num_key_value_heads": 4},
    },
    "360M": {
        **{"vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32},
        **{"num_attention_heads": 15, "num_key_value_heads": 5},
    },
}
"""Llamas with D = 64 and a tied head, of 100.1 and 361.8 million parameters."""


def main() -> None:
    """Measure every model and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="100M,360M", help="of shipped, twin, 100M, 360M")
    parser.add_argument("--weights", default="bf16,exact12,int8,q4", help="formats of ours; bf16 is the baseline")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-models"), help="where models are made")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    result: dict[str, Any] = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "read_bytes_per_s": read_bandwidth(torch.device("cpu")),
        "models": {},
    }
    print(f"plain read: {result['read_bytes_per_s'] / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    for name in options.models.split(","):
        found = result["models"][name] = measure(name, options)
        print_model(name, found)
        write_report(options.out, result)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return both tables of one model."""
    folder = model_folder(name, options.folder)
    engines = {f"vivace {kind}": open_as(folder, kind) for kind in options.weights.split(",")}
    first = next(iter(engines.values()))
    texts = random_texts(folder, options.prompts) if name in SHAPES else packaged_texts(options.prompts)
    questions = [BenchmarkPrompt(text, tuple(first.tokenizer.encode_prompt(text))) for text in texts]
    rivals, heat = peer_systems(
        [peer for peer in options.peers.split(",") if peer],
        folder,
        questions,
        max_new_tokens=options.max_new_tokens,
        device=torch.device("cpu"),
    )
    ours = [Named(kind, MethodSystem("plain", engine, options.max_new_tokens)) for kind, engine in engines.items()]
    records: list[Record] = run_benchmark([*ours, *rivals], questions, repeats=options.repeats)
    return {
        "weight_bytes": pass_bytes(first.model),
        "kernels": first.kernels.name,
        "heat": None if heat is None else asdict(heat),
        "runs": [asdict(run) for run in summarise(records, ours[0].name)],
        "passes": time_passes(engines, [r for r in rivals if isinstance(r, LlamaCppPeer)], 2 * options.repeats + 1),
    }


def open_as(folder: Path, weights: str) -> Engine:
    """Load a checkpoint in one of our weight formats."""
    return vivace.load(folder) if weights == "bf16" else vivace.load(folder, weights=weights)


@torch.inference_mode()
def time_passes(
    engines: dict[str, Engine], rivals: Sequence[LlamaCppPeer], repeats: int
) -> dict[str, dict[int, float]]:
    """Return the median seconds of a pass by engine and rows.

    While an engine waits, its weights leave the cache and its threads fall asleep. Therefore each pass runs twice in
    its turn and the second time counts.
    """
    passes: dict[str, list[Callable[[], object]]] = {
        name: passes_over(engine.model, ROWS, context=CONTEXT) for name, engine in engines.items()
    }
    passes |= {rival.name: llama_cpp_passes(rival.engine, ROWS, context=CONTEXT) for rival in rivals}
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in passes}
    for repeat in range(repeats):
        for name in sorted(passes, reverse=repeat % 2 == 1):
            for rows, run in zip(ROWS, passes[name], strict=True):
                run()
                start = time.perf_counter()
                run()
                times[name][rows].append(time.perf_counter() - start)
    return {name: {rows: statistics.median(found) for rows, found in by.items()} for name, by in times.items()}


def model_folder(name: str, place: Path) -> Path:
    """Return the folder of a model, which is made if it does not exist."""
    if name == "shipped":
        return SHIPPED
    folder = place / name
    if (folder / "config.json").is_file():
        return folder
    if name == "twin":
        return widen_checkpoint(SHIPPED, folder, 4, twins())
    return make_random(folder, SHAPES[name])


def make_random(folder: Path, shape: dict[str, int]) -> Path:
    """Write a Llama with random bfloat16 weights, and a tokenizer with a word for every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words()][: shape["vocab_size"]]
    # without merges, and with whole pieces looked up first, a word is the id we want it to be
    bpe = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def words() -> list[str]:
    """Return pieces of four letters behind a space in the spelling of byte-level tokenizers, enough for 65,000 ids."""
    return ["Ġ" + "".join(letters) for letters in islice(product(string.ascii_lowercase, repeat=4), 65536)]


def random_texts(folder: Path, count: int) -> list[str]:
    """Return prompts of `PROMPT_WORDS` random tokens."""
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    known = [piece for piece in vocab if len(piece) > 1]
    draw = random.Random(0)
    return ["".join(draw.choices(known, k=PROMPT_WORDS)).replace("Ġ", " ") for _ in range(count)]


def packaged_texts(count: int) -> list[str]:
    """Return prompts that come with the package."""
    return [str(prompt.request) for prompt in packaged_prompts("e2e")[:count]]


def print_model(name: str, found: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"\n{name}: {found['weight_bytes'] / 1e6:.0f} MB of bf16 weights a pass, {found['kernels']} kernels")
    print(f"{'':16}{'tokens/s':>10}{'x bf16':>8}{'lowest':>9}{'highest':>9}  identical")
    for run in found["runs"]:
        low, high = run["tokens_per_s_spread"]
        same = "yes" if run["identical"] else f"{run['num_different']} differ"
        print(f"{run['method']:16}{run['tokens_per_s']:10.1f}{run['speedup']:8.2f}{low:9.1f}{high:9.1f}  {same}")
    print(f"\n{'ms a pass, k =':16}" + "".join(f"{rows:>9}" for rows in ROWS) + "   (k)/(1): 4, 8, 16")
    for system, by in found["passes"].items():
        ratios = ", ".join(f"{by[rows] / by[1]:.2f}" for rows in (4, 8, 16))
        print(f"{system:16}" + "".join(f"{by[rows] * 1e3:9.3f}" for rows in ROWS) + f"   {ratios}")


if __name__ == "__main__":
    main()

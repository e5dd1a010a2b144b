"""Time passes over 1, 8 and 16 rows of matrices in two and three bits beside q4, on Llamas with drawn codes.

Run it on a machine that does nothing else:

    python -m benchmarks.palette_kernels --models 100M,360M --out benchmarks/results/kernels/palettes.json

A folder of palettes is written for each format, with codes, entries and scales that are drawn, and loaded as any other;
products take as long as with codes that mean something. All formats and numbers of rows take turns within a repeat.
``lut2`` and ``lut3`` have bfloat16 entries, ``ints`` integers with scales. Embedding and head have eight bits in
palettes and what ``--weights q4`` gives them there. A pass runs twice in its turn and the second time counts, since
what waits falls asleep.

``--peers`` adds llama.cpp on models of the same shapes, quantized by itself: ``llama.cpp-q3_k_s``, ``llama.cpp-q2_k``
and others of ``vivace bench --peers``. Its K-quants need inputs in multiples of 256, so most matrices of the 360 M
model (960 inputs) get a format that it falls back to; the bytes that it reads stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import _random_llama
from benchmarks.peers import SHAPES, model_folder
from benchmarks.result_files import write_report
from vivace.checkpoint.files import WEIGHTS, write_tensors
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.quantized.palette import CONFIG, tensors_of
from vivace.core.cpu.backend import backend_of, pack_decoder
from vivace.core.model import Decoder
from vivace.evaluate.llamacpp import LlamaCppPeer, enter_llama_cpp, llama_cpp_passes
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes, passes_over
from vivace.kernels.choice import choose
from vivace.kernels.coded import PaletteCodes, RowCodes
from vivace.kernels.library import GROUP, LANES
from vivace.kernels.native import NativeBody

ROWS = (1, 2, 8, 16)
FORMATS = {"lut2": (2, False), "lut3": (3, False), "lut2 ints": (2, True), "lut3 ints": (3, True)}
"""Bits, and whether entries are integers with scales."""
CONTEXT = 128


def main() -> None:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--formats", default=",".join(("q4", *FORMATS)))
    parser.add_argument("--kernels", default="auto", help="auto, avx2, avx512 or amx")
    parser.add_argument("--peers", default="", help="llama.cpp-q3_k_s, llama.cpp-q2_k, with commas")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench-models"), help="where models for peers are made"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("palettes.json"))
    options = parser.parse_args()
    choice = choose(options.kernels)
    if choice.body is None:
        parser.error(f"there is nothing to measure: {choice.reason}")
    names = options.models.split(",")
    peers = {
        name: peers_of(name, [each for each in options.peers.split(",") if each], options.folder) for name in names
    }
    with torch.inference_mode():
        found = {
            name: measure(name, options.formats.split(","), choice.body, options.repeats, peers[name]) for name in names
        }
    where = asdict(provenance(torch.device("cpu")))
    result = {"provenance": where, "kernels": choice.name, "threads": torch.get_num_threads(), "models": found}
    write_report(options.out, result)
    print_table(result)


def peers_of(name: str, peers: Sequence[str], place: Path) -> list[LlamaCppPeer]:
    """Return llama.cpp on a model of drawn weights, in each format; nothing is made where none is asked for."""
    return enter_llama_cpp(peers, model_folder(name, place), [], max_new_tokens=512, batch_size=1) if peers else []


def measure(
    name: str, formats: list[str], body: NativeBody, repeats: int, peers: Sequence[LlamaCppPeer] = ()
) -> dict[str, Any]:
    """Return the bytes and the median seconds of passes of one model in each format, and of peers."""
    decoders = {kind: decoder_in(name, kind, body) for kind in formats}
    passes = {kind: passes_over(decoder, ROWS, context=CONTEXT) for kind, decoder in decoders.items()}
    passes |= {peer.name: llama_cpp_passes(peer.engine, ROWS, context=CONTEXT) for peer in peers}
    works: dict[tuple[str, int], Callable[[], object]] = {
        (kind, rows): run for kind, runs in passes.items() for rows, run in zip(ROWS, runs, strict=True)
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            work()  # weights and threads of what has waited are called back
            start = time.perf_counter()
            work()
            if repeat:
                times[key].append(time.perf_counter() - start)
    num_bytes = {kind: pass_bytes(decoder) for kind, decoder in decoders.items()}
    num_bytes |= {peer.name: peer.engine.num_bytes for peer in peers}
    return {
        kind: {
            "weight_bytes": num_bytes[kind],
            "seconds": {str(rows): statistics.median(times[kind, rows]) for rows in ROWS},
        }
        for kind in passes
    }


def decoder_in(name: str, kind: str, body: NativeBody) -> Decoder:
    """Return a model of random weights, or of drawn codes."""
    if kind == "q4":
        decoder = _random_llama(SHAPES[name])
        pack_decoder(decoder, body, "q4")
        return decoder
    bits, has_scales = FORMATS[kind]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_drawn(folder, SHAPES[name], bits, has_scales=has_scales)
        return load_decoder(
            folder, dtype="bfloat16", device="cpu", backend=partial(backend_of, body, "bf16", is_required=False)
        )


def write_drawn(folder: Path, shape: dict[str, int], bits: int, *, has_scales: bool) -> None:
    """Write a Llama whose matrices are drawn palettes."""
    torch.manual_seed(0)
    width, layers = shape["hidden_size"], range(shape["num_hidden_layers"])
    tensors: dict[str, Tensor] = {"model.norm.weight": torch.ones(width).bfloat16()}
    for name, out, wide in _matrices(shape):
        tensors |= tensors_of(name, drawn(out, wide, bits, has_scales=has_scales))
    for index in layers:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{norm}.weight"] = torch.ones(width).bfloat16()
    table = torch.randn(shape["vocab_size"], width).bfloat16() * 0.02
    tensors |= tensors_of("model.embed_tokens.weight", RowCodes.of(table))
    write_tensors(folder / WEIGHTS, tensors)
    config = {**shape, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "quantization_config": dict(CONFIG)}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")


def _matrices(shape: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield name, outputs and inputs of each matrix of the layers."""
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    sizes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    sizes["mlp.down_proj"] = (width, inner)
    for index in range(shape["num_hidden_layers"]):
        for name, (out, wide) in sizes.items():
            yield f"model.layers.{index}.{name}.weight", out, wide


def drawn(out: int, wide: int, bits: int, *, has_scales: bool) -> PaletteCodes:
    """Return a matrix of drawn codes, entries and scales."""
    codes = torch.randint(0, 2**bits, (out, wide), dtype=torch.uint8)
    tiles = -(-out // LANES)
    if not has_scales:
        return PaletteCodes(codes, (torch.randn(tiles, 2**bits) * 0.02).sort(1).values.bfloat16(), None)
    entries = torch.randint(-127, 128, (tiles, 2**bits)).sort(1).values.to(torch.int8)
    scales = (torch.rand(out, -(-wide // GROUP)) * 4e-4).bfloat16()
    return PaletteCodes(codes, entries, scales)


def print_table(result: dict[str, Any]) -> None:
    """Print milliseconds, and the factor from q4 at each number of rows."""
    print(f"{result['kernels']}, {result['threads']} threads; ms, and times q4's")
    for name, formats in result["models"].items():
        base = formats.get("q4", next(iter(formats.values())))["seconds"]
        for kind, found in formats.items():
            cells = "".join(
                f"{rows:>4} rows {seconds * 1e3:8.2f} {seconds / base[rows]:5.2f}x"
                for rows, seconds in found["seconds"].items()
            )
            print(f"{name:6}{kind:17}{found['weight_bytes'] / 1e6:8.1f} MB{cells}")


if __name__ == "__main__":
    main()

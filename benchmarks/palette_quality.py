"""What is lost in three bits, by method: divergence and loss on held-back rows, perplexity and zero-shot choices.

    python -m benchmarks.palette_quality --model M --data FILE --tasks FILE... --work DIR --out quality.json

Every way rounds the same model on the same text into a folder of ``--work``, which is kept and found again. The stored
model is judged beside them on task files (``vivace data zeroshot|wikitext``). With ``--gguf`` llama.cpp quantizes the
same weights, and we read its files. ``--folders`` adds what ``vivace train palette`` and ``vivace train recover`` have
made of the same model, and what ``benchmarks.rival_rounding`` has, as NAME=FOLDER. Bits are bytes of the file times
eight over weights, for the matrices of the layers and for everything; the adapter that a folder wears counts in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks.result_files import write_report
from vivace.adapters.lora import recovery_of
from vivace.checkpoint.files import resolve
from vivace.checkpoint.gguf.header import read_header
from vivace.checkpoint.load import load_config, load_decoder, open_checkpoint
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.evaluate.judging import JudgedSystem, judge, mean_accuracy
from vivace.evaluate.provenance import provenance
from vivace.evaluate.zeroshot import load_task
from vivace.palette.compress import CompressConfig, compress
from vivace.palette.statistics import distance
from vivace.palette.texts import Texts, read_texts

WAYS: dict[str, CompressConfig] = {
    "rtn": CompressConfig(3, method="rtn"),
    "k-means, weighted": CompressConfig(3, method="kmeans"),
    "fisher": CompressConfig(3, method="fisher"),
    "gptq": CompressConfig(3, method="gptq"),
    "gptq, bfloat16 entries": CompressConfig(3, method="gptq", has_scales=False),
    "gptq, 3.1 bits mixed": CompressConfig(None, 3.1),
    "gptq, 3.7 bits mixed": CompressConfig(None, 3.7),
}
QUANTS = {"Q3_K_S": 11, "Q4_K_M": 15}
"""Files that llama.cpp writes, with the numbers that its library has for them (LLAMA_FTYPE_MOSTLY_*)."""


def main() -> None:
    """Round, judge and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vivace-14m")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--tasks", type=Path, nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=200, help="rows of each task")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", "; "), help="with commas; a comma inside is ;")
    parser.add_argument("--folders", nargs="*", default=[], help="NAME=FOLDER: palettes that were trained")
    parser.add_argument("--gguf", type=Path, help="the model as a GGUF file, which llama.cpp quantizes")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    source = resolve(options.model)
    longest = min(320, load_config(source).max_positions)
    texts = read_texts(
        options.data, load_tokenizer(source), num_tokens=options.tokens, longest=longest, tokens_per_batch=2048
    )
    rows: dict[str, dict[str, Any]] = {}
    for way in filter(None, options.ways.split(",")):
        name = way.strip().replace("; ", ", ")
        rows[name] = rounded(source, options.work / name.replace(", ", "-").replace(" ", "-"), WAYS[name], texts)
        print(name, rows[name], flush=True)
    for name, _, folder in (each.partition("=") for each in options.folders):
        rows[name] = trained(source, Path(folder), texts)
        print(name, rows[name], flush=True)
    if options.gguf is not None:
        for name in QUANTS:
            rows[name] = quantized(source, options.gguf, options.work / f"{name}.gguf", name, texts)
            print(name, rows[name], flush=True)
    if options.tasks:
        add_judgements(rows, source, [row for path in options.tasks for row in load_task(path, options.limit)])
    for row in rows.values():
        row["folder"] = Path(row["folder"]).name
    setting: dict[str, Any] = {"model": Path(options.model).name, "tokens": options.tokens}
    setting |= {"data": [path.name for path in options.data]}
    setting |= {"tasks": [path.name for path in options.tasks], "limit": options.limit}
    result = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "ways": rows}
    write_report(options.out, result)


def rounded(source: Path, out: Path, config: CompressConfig, texts: Texts) -> dict[str, Any]:
    """Return what a folder of palettes is like, which is written unless it is there."""
    facts = out / "facts.json"
    if not facts.is_file():
        made = compress(source, out, config, texts)
        assert made.measured is not None
        values: dict[str, float | None] = {"matrix_bits": made.written.matrix_bits, "all_bits": made.written.all_bits}
        values |= {"predicted": made.predicted, **asdict(made.measured)}
        facts.write_text(json.dumps(values), encoding="utf-8")
    return {"folder": str(out), **json.loads(facts.read_text(encoding="utf-8"))}


def trained(source: Path, folder: Path, texts: Texts) -> dict[str, Any]:
    """Return what a folder of palettes is like that a training has made, with the adapter that it wears, if any.

    ``bits.json`` says how many bits another project would store for the numbers of a folder.

    With an adapter there is no divergence on the text that was held back: task files judge it as it is used.
    """
    adapter = recovery_of(folder)
    worn_bytes = 0 if adapter is None else (adapter / "adapter_model.safetensors").stat().st_size
    if (folder / "bits.json").is_file():
        bits: dict[str, float] = json.loads((folder / "bits.json").read_text(encoding="utf-8"))
    else:
        bits = bits_of(folder, worn_bytes)
    found: dict[str, Any] = {"folder": str(folder), **bits, "predicted": None}
    if adapter is not None:
        return found | {"kl": None, "loss": None, "adapter_bytes": worn_bytes}
    made, stored = (load_decoder(place, dtype="float32") for place in (folder, source))
    return found | asdict(distance(made, stored, texts.held_back))


def bits_of(folder: Path, worn_bytes: int = 0) -> dict[str, float]:
    """Return the bits a weight of a folder's files, for the matrices of the layers and for everything, with the bytes
    of an adapter counted in both.
    """
    opened = open_checkpoint(folder)
    table = opened.plan

    def bits(names: Sequence[str]) -> float:
        pieces = [piece.name for name in names for piece in table[name].pieces]
        num_bytes = sum(map(opened.stored.num_bytes, pieces)) + worn_bytes
        return 8 * num_bytes / sum(prod(table[name].shape) for name in names)

    matrices = [name for name, target in table.items() if name.startswith("layers.") and len(target.shape) == 2]
    return {"matrix_bits": bits(matrices), "all_bits": bits(list(table))}


def quantized(source: Path, stored: Path, out: Path, kind: str, texts: Texts) -> dict[str, Any]:
    """Return what a file is like that llama.cpp has quantized, which is written unless it is there."""
    if not out.is_file():
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = QUANTS[kind]
        failed = llama_cpp.llama_model_quantize(str(stored).encode(), str(out).encode(), params)
        if failed:
            raise SystemExit(f"llama.cpp does not write {kind}: {failed}")
    tensors = read_header(out).tensors
    layers = [each for name, each in tensors.items() if name.startswith("blk.") and len(each.shape) == 2]
    bits = {
        key: 8 * sum(each.num_bytes for each in chosen) / sum(prod(each.shape) for each in chosen)
        for key, chosen in (("matrix_bits", layers), ("all_bits", list(tensors.values())))
    }
    model = load_decoder(resolve(out), dtype="float32")
    found = distance(model, load_decoder(source, dtype="float32"), texts.held_back)
    return {"folder": str(out), **bits, "predicted": None, **asdict(found)}


def add_judgements(rows: dict[str, dict[str, Any]], source: Path, asked: Sequence[Any]) -> None:
    """Judge the stored model and every way on task files, all of them row by row."""
    engines = {"stored": vivace.load(source)} | {name: vivace.load(row["folder"]) for name, row in rows.items()}
    print(*(f"{name}: {engine.kernels.name}" for name, engine in engines.items()), sep="; ", flush=True)
    found = judge([JudgedSystem(*each) for each in engines.items()], asked)
    stored = [each for each in found if each.system == "stored"]
    for name, row in rows.items():
        row["judgements"] = [asdict(each) for each in found if each.system == name]
        row["mean_accuracy"] = mean_accuracy(found, name)
        row["stored_accuracy"] = mean_accuracy(found, "stored")
        row["stored_perplexity"] = {each.task: each.perplexity for each in stored}
        row["stored_nll"] = {each.task: each.nll for each in stored}
        print(name, row["mean_accuracy"], row["stored_accuracy"], flush=True)


if __name__ == "__main__":
    main()

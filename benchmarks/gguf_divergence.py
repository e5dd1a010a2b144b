"""How far our kernels and llama.cpp's are from the exact product of a GGUF file's own weights.

    python -m benchmarks.gguf_divergence --model FILE.gguf... --text TEXT --out FILE

The reference computes in float32 with the weights as the file decodes them, as transformers would on the decoded
folder. Our native kernels and llama.cpp both round inputs to eight bits, each in its own way. Texts are read in pieces
that begin without context, and every token is scored: the divergence KL(reference || program) in nats a token, its
interval by the paired bootstrap over pieces, and how often the likeliest token is another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vivace
from benchmarks import captions
from benchmarks.result_files import NO_RUN, write_report
from tools.blocks import table
from vivace.checkpoint.files import resolve
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.evaluate.bootstrap import paired_bootstrap
from vivace.evaluate.likelihood import ContextOptions, LikelihoodReader
from vivace.evaluate.llamacpp import LlamaCpp, LlamaRows
from vivace.evaluate.provenance import provenance
from vivace.train.distillation import divergence


def main() -> None:
    """Read every piece with the three programs and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=40)
    parser.add_argument("--length", type=int, default=256, help="tokens of a piece")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    for path in options.model:
        require_pieces(path, text, options.pieces, options.length)
    setting = {"text": options.text.name, "pieces": options.pieces, "length": options.length}
    models = {path.name: compared(path, text, options.pieces, options.length) for path in options.model}
    write_report(
        options.out, {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "models": models}
    )


def require_pieces(path: Path, text: str, count: int, length: int) -> None:
    """Refuse a text that is too short for as many pieces as the result will say.

    Raises:
        SystemExit: a file's tokenizer makes fewer tokens of it.
    """
    tokens = len(load_tokenizer(resolve(path)).encode(text, special=False))
    if tokens < count * length:
        raise SystemExit(f"{path.name}: the text has {tokens} tokens, and {count} pieces of {length} are asked for")


@torch.inference_mode()
def compared(path: Path, text: str, num_pieces: int, length: int) -> dict[str, Any]:
    """Return the divergences of our kernels and of llama.cpp on one file."""
    exact, ours = vivace.load(resolve(path), dtype="float32"), vivace.load(resolve(path))
    theirs = LlamaCpp(path, num_threads=torch.get_num_threads(), capacity=length)
    readers = {name: LikelihoodReader(engine.model) for name, engine in (("exact", exact), ("vivace", ours))}
    found: dict[str, dict[str, list[float]]] = {name: {"kl": [], "other": []} for name in ("vivace", "llama.cpp")}
    for piece in _pieces(exact.tokenizer.encode(text, special=False), num_pieces, length):
        question = ContextOptions(piece[:1], (piece[1:],))
        reference = readers["exact"].logits(question)[0].float()
        logits = {"vivace": readers["vivace"].logits(question)[0].float(), "llama.cpp": _by_llama_cpp(theirs, piece)}
        for name, own in logits.items():
            found[name]["kl"].append(float(divergence(own, reference)) / len(reference))
            found[name]["other"].append(float((own.argmax(-1) != reference.argmax(-1)).float().mean()))
        print(path.name, {name: values["kl"][-1] for name, values in found.items()}, flush=True)
    means = {name: {key: sum(own) / len(own) for key, own in values.items()} for name, values in found.items()}
    change = paired_bootstrap(found["vivace"]["kl"], found["llama.cpp"]["kl"])
    return {"kernels": ours.kernels.name, "programs": means, "change": asdict(change)}


def table_of(path: Path) -> str:
    """Return the divergences of a result file, a row for each program and model."""
    if not path.is_file():
        return NO_RUN
    written = json.loads(path.read_text(encoding="utf-8"))
    setting, rows = written["setting"], []
    for name, found in written["models"].items():
        change = found["change"]
        beside = f"{change['estimate']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})"
        for program, own in found["programs"].items():
            rows.append(
                (
                    f"`{name}`",
                    program,
                    f"{own['kl']:.4f}",
                    f"{own['other']:.1%}",
                    beside if program == "vivace" else "",
                )
            )
    kernels = next(iter(written["models"].values()))["kernels"]
    caption = (
        f"{setting['pieces']} pieces of {setting['length']} tokens of {setting['text']}; "
        f"{captions.machine(written['provenance'], kernels)}."
    )
    heads = ("file", "program", "KL to float32", "another likeliest token", "beside llama.cpp")
    return f"{caption}\n\n{table(heads, rows)}"


def _pieces(tokens: list[int], count: int, length: int) -> Iterator[tuple[int, ...]]:
    for at in range(0, min(count * length, len(tokens) - length + 1), length):
        yield tuple(tokens[at : at + length])


def _by_llama_cpp(engine: LlamaCpp, piece: tuple[int, ...]) -> Tensor:
    """Return llama.cpp's logits (len(piece) - 1, V) of the tokens behind each prefix of a piece."""
    count = len(piece) - 1
    engine.forget()
    rows = LlamaRows(piece[:-1], range(count), [0] * count, range(count))
    return torch.stack([torch.from_numpy(row.copy()) for row in engine.run(rows)])


if __name__ == "__main__":
    main()

"""Measure the cost of comparing the checksum of every page that is streamed, in pairs of runs with and without.

    python -m benchmarks.checksums make streamed-models
    python -m benchmarks.checksums run streamed-models --out benchmarks/results/checksums/NAME.json

``make`` writes three models of at least half a gigabyte with random weights, as stores: a dense one and a mixture of
experts in the layout ``layers``, and one in the layout ``neurons`` (``flash_models.make``, whose sparsity is
synthetic). ``run`` decodes the same prompt with threads that compare checksums and with threads that do not, in turns,
with half of the model in memory, reading directly from the device. Both read into the same memory of one process,
because the place of the memory changes the speed by more than the checksums do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import captions, flash_models
from benchmarks.result_files import NO_RUN, read_named, write_report
from vivace.core.model import Decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.kernels.library import found_library
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.experts.cache import CHUNK_BYTES
from vivace.storage.io.checksums import CheckedReader
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.readers import NUM_THREADS, PAGE, address, aligned
from vivace.storage.loading import SCATTERED_THREADS, Storage, load_stored
from vivace.storage.store import open_store

KINDS = ("layers", "experts", "neurons")
"""Names of the three models."""
SHARE = 0.5
"""Share of the model in memory."""
TOKENS = 256
"""Number of tokens of prompt and answer for which memory is planned."""


def main() -> None:
    """Make the stores, or measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make", help="write the models and their stores").add_argument("folder", type=Path)
    measured = commands.add_parser("run", help="measure pairs")
    measured.add_argument("folder", type=Path)
    measured.add_argument("--out", type=Path, required=True)
    measured.add_argument("--pairs", type=int, default=6)
    measured.add_argument("--new-tokens", type=int, default=12)
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder)
    else:
        run(options.folder, options.out, options.pairs, options.new_tokens)


def make(folder: Path) -> None:
    """Write the models and their stores."""
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    dense = transformers.LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, **shape)
    mixed = transformers.MixtralConfig(
        **{"hidden_size": 1024, "intermediate_size": 1408, "num_hidden_layers": 8, "num_local_experts": 16},
        **{"num_experts_per_tok": 2, **shape},
    )
    for name, config in (("layers", dense), ("experts", mixed)):
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(
            folder / name / "model"
        )
        write_store(folder / name / "model", folder / name / "store")
    flash_models.make(folder / "flash", width=2048, ffn=8192, layers=12, heads=16, vocab=8192)
    (folder / "neurons").mkdir(exist_ok=True)
    (folder / "flash" / "neurons").rename(folder / "neurons" / "store")


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Decoder, Storage]]:
    """Open a store with half of its weights in memory, with the kernels that it was written for."""
    store = open_store(folder)
    body = choose("auto").body if store.is_tiled or store.layout == "neurons" else None
    budget = int(SHARE * plan_memory(store, None, TOKENS).total_bytes)
    model, storage = load_stored(folder, budget, reader="direct", num_tokens=TOKENS, body=body)
    try:
        yield model, storage
    finally:
        storage.close()


def decode(model: Decoder, new_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds per token after the prompt, and the tokens."""
    prompt = torch.randint(0, model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    session = Session(model, num_slots=1, capacity=TOKENS)
    session.admit(Request(tuple(prompt), new_tokens, NoDrafts()))
    tokens = [token for emitted in session.step() for token in emitted.tokens]
    begun, known = time.perf_counter(), len(tokens)
    tokens += [token for emitted in session.drain() for token in emitted.tokens]
    return (time.perf_counter() - begun) / (len(tokens) - known), tokens


def switches(storage: Storage) -> dict[str, Callable[[], None]]:
    """Return functions that direct reads to threads that compare checksums or to others, into the same memory."""
    reader = storage.reader.reader
    assert isinstance(reader, CheckedReader)
    if storage.experts is not None:
        owner, compares = storage.experts.fetches, storage.experts.fetches.reader
        other = open_async_reader(reader.inner, chunk_bytes=CHUNK_BYTES)
    else:
        num_threads = SCATTERED_THREADS if storage.neurons is not None else NUM_THREADS
        owner, compares = storage.stream or storage.neurons, storage.async_reader
        other = open_async_reader(reader.inner, num_threads=num_threads)
    return {
        "checked": lambda: setattr(owner, "reader", compares),
        "unchecked": lambda: setattr(owner, "reader", other),
    }


def measure(folder: Path, pairs: int, new_tokens: int) -> dict[str, Any]:
    """Measure one model with and without checksums in turns; the order alternates from pair to pair."""
    seconds: dict[str, list[float]] = {"checked": [], "unchecked": []}
    texts = []
    with opened(folder / "store") as (model, storage):
        ways = list(switches(storage).items())
        for pair in range(pairs + 1):
            for name, switch in ways[:: 1 if pair % 2 else -1]:
                switch()
                took, tokens = decode(model, new_tokens)
                texts.append(tokens)
                if pair:  # the first lays weights out
                    seconds[name].append(took)
        ways[0][1]()
        before = bytes_read(storage)
        decode(model, new_tokens)
        read, size = bytes_read(storage) - before, storage.store.num_bytes
    assert all(text == texts[0] for text in texts)
    ratios = [a / b for a, b in zip(seconds["checked"], seconds["unchecked"], strict=True)]
    return {
        "store_bytes": size,
        "read_bytes": read / new_tokens,
        "ms": {name: [1e3 * each for each in found] for name, found in seconds.items()},
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def bytes_read(storage: Storage) -> int:
    """Return the number of bytes read so far."""
    if storage.experts is None:
        return storage.async_reader.traffic.num_bytes
    return storage.experts.counts.loads * storage.experts.store.expert_bytes


def summing_gb_per_s(num_bytes: int = 1 << 20) -> float | None:
    """Return the speed of checksums in 10^9 bytes per second of one thread, in its cache; None without native
    library.
    """
    library = found_library()
    if library is None:
        return None
    memory, sums = aligned(num_bytes), aligned(num_bytes // PAGE * 4)
    best = 0.0
    for _ in range(20):
        begun = time.perf_counter()
        library.vivace_page_sums(address(memory), num_bytes // PAGE, address(sums), 0)
        best = max(best, num_bytes / (time.perf_counter() - begun) / 1e9)
    return best


def run(folder: Path, out: Path, pairs: int, new_tokens: int) -> None:
    """Measure every kind and write a file."""
    found = {name: measure(folder / name, pairs, new_tokens) for name in KINDS}
    result = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "setting": {"share": SHARE, "pairs": pairs, "new_tokens": new_tokens},
        "summing_gb_per_s": summing_gb_per_s(),
        "kinds": found,
    }
    write_report(out, result)
    print(table(result))


def tables(folder: Path) -> str:
    """Return one table for each file, with what it was measured on."""
    parts = []
    for stem, result in read_named(folder):
        p, pairs = result["provenance"], result["setting"]["pairs"]
        parts.append(
            f"**{stem}**: {p['cpu']}, {p['num_threads']} thread(s), {pairs} pairs, one thread sums "
            f"{result['summing_gb_per_s']:.1f} GB/s in its cache, {captions.tree(p)}."
        )
        parts.append(table(result))
    return "\n\n".join(parts) or NO_RUN


def table(result: dict[str, Any]) -> str:
    """Return one result as a Markdown table."""
    heads = (
        "",
        "GB on disk",
        "GB read a token",
        "ms a token, checked",
        "unchecked",
        "ratio of a pair: median (least, most)",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, kind in result["kinds"].items():
        checked, unchecked = (statistics.median(kind["ms"][each]) for each in ("checked", "unchecked"))
        sizes = f"{kind['store_bytes'] / 1e9:.2f} | {kind['read_bytes'] / 1e9:.3f}"
        spread = f"{kind['median_ratio']:.2f} ({min(kind['ratios']):.2f}, {max(kind['ratios']):.2f})"
        lines.append(f"| {name} | {sizes} | {checked:.1f} | {unchecked:.1f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

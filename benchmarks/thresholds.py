"""What a model with SwiGLU loses and gains where neurons are left out: ``python -m benchmarks.thresholds MODEL``.

For each of ``--errors`` the model becomes a store of layout ``selected``, whose thresholds change the output of no
layer by more than that on the rows of ``--calibrate``; 0 leaves nothing out. All stores, and one of layout ``layers``
that every neuron is read from, may take ``--share`` of the model as memory. The model in memory answers the prompts of
``--prompts`` greedily, and each store follows these answers, token by token as it decodes: how many of the tokens it
would have written, by how many nats less likely they are to it, how fast, and what it reads for a token. Rows take
turns within a repeat. The file that is read is dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.capped import drop
from benchmarks.following import Text, followed, written
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.checkpoint.files import resolve
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.evaluate.provenance import provenance
from vivace.files import write_text
from vivace.kernels.choice import choose
from vivace.prompts import load_prompts
from vivace.storage.convert import write_store
from vivace.storage.loading import load_stored
from vivace.storage.neurons.calibration import calibrate, texts_of
from vivace.storage.store import DATA
from vivace.units import format_bytes

EVERY = "every neuron, layer by layer"
FACTS = "calibration.json"
SPARE = 16
"""Tokens beyond the longest text that a plan leaves room for."""


def stores(given: argparse.Namespace) -> dict[str, Path]:
    """Return the store of each row, which is made unless it is there."""
    found = {EVERY: given.work / "layers"}
    if not found[EVERY].is_dir():
        write_store(given.model, found[EVERY])
    tokenizer = load_tokenizer(resolve(given.model))
    rows = [row for row in load_prompts(given.calibrate) if row.references][: given.rows]
    texts = [text[: given.longest] for text in texts_of(tokenizer, rows)]
    for error in given.errors:
        folder = found[f"{error:g}"] = given.work / f"selected-{error:g}"
        if not (folder / FACTS).is_file():
            store = write_store(given.model, folder, layout="selected")
            facts = [asdict(each) for each in calibrate(given.model, store, texts, error=error)]
            write_text(folder / FACTS, json.dumps(facts) + "\n")
            print(f"{error:g}", {key: round(_mean(facts, key), 4) for key in ("active_share", "error")}, flush=True)
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all rows."""
    folders, body = stores(given), choose("auto").body
    tokenizer = load_tokenizer(resolve(given.model))
    asked = [tokenizer.encode_prompt(row.request) for row in load_prompts(given.prompts)]
    model = vivace.load(given.model).model
    texts = [written(model, prompt, given.tokens) for prompt in asked if len(prompt) <= given.longest][: given.limit]
    del model
    limit = int((folders[EVERY] / DATA).stat().st_size * given.share)
    rows: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in folders}
    for repeat in range(given.repeats):
        for name, folder in folders.items():
            found = row(folder, limit, texts, body)
            rows[name]["seconds"].append(found.pop("seconds"))
            rows[name] |= found
            print(repeat, name, rows[name], flush=True)
    for name, folder in folders.items():
        if name != EVERY:
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            rows[name] |= {key: _mean(facts, key) for key in ("active_share", "error")}
    return {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "kernels": choose("auto").name,
        "thresholds": {
            "model": Path(given.model).name,
            "model_bytes": (folders[EVERY] / DATA).stat().st_size,
            "limit_bytes": limit,
            "texts": len(texts),
            "rows": rows,
        },
    }


def row(folder: Path, limit: int, texts: Sequence[Text], body: Any) -> dict[str, Any]:
    """Return the figures of one store."""
    drop(folder / DATA)
    longest = max(len(text.prompt) + len(text.tokens) for text in texts) + SPARE
    model, storage = load_stored(folder, limit, reader="direct", num_tokens=longest, body=body)
    try:
        followed(model, texts[:1])
        reader = storage.async_reader if storage.neurons is None else storage.neurons.reader
        before = reader.traffic.num_bytes
        found = asdict(followed(model, texts))
        found["read_bytes"] = (reader.traffic.num_bytes - before) / found["num_tokens"]
        found["planned_bytes"] = storage.plan.num_bytes
        return found
    finally:
        storage.close()


def _mean(facts: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.mean(each[key] for each in facts)


def tables(folder: Path) -> str:
    """Return the table of every result file of a folder."""
    return tables_of(folder, _tables)


def _tables(report: Mapping[str, Any]) -> list[str]:
    t = report["thresholds"]
    caption = (
        f"**{t['model']}**, {format_bytes(t['model_bytes'])}, in {format_bytes(t['limit_bytes'])} of memory; "
        f"{t['texts']} greedy answers of the model in memory, followed token by token, "
        f"{len(t['rows'][EVERY]['seconds'])} times in turns, median. Bytes read are those of decoded tokens and of "
        f"prompts. {captions.machine(report['provenance'], report['kernels'])}."
    )
    slowest = statistics.median(t["rows"][EVERY]["seconds"])
    rows = [
        (
            name if name == EVERY else f"error at most {name}",
            f"{one['active_share']:.1%}" if "active_share" in one else "100%",
            f"{one['error']:.1%}" if "error" in one else "0%",
            f"{one['agreed']:.1%}",
            f"{one['surprise']:.3f}",
            f"{one['num_tokens'] / statistics.median(one['seconds']):.1f}",
            f"{slowest / statistics.median(one['seconds']):.2f}x",
            format_bytes(int(one["read_bytes"])),
        )
        for name, one in t["rows"].items()
    ]
    heads = (
        "thresholds",
        "neurons computed",
        "change of a layer, held back",
        "tokens as the model's",
        "nats a token lost",
        "tokens/s",
        "speed",
        "read a token",
    )
    return [caption, table(heads, rows)]


def main() -> None:
    """Measure and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=60, help="rows to calibrate on")
    parser.add_argument("--longest", type=int, default=192, help="tokens of a prompt, and of a row to calibrate on")
    parser.add_argument("--limit", type=int, default=12, help="answers")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report = measure(given)
    write_report(given.json, report)
    print("\n\n".join(_tables(report)))


if __name__ == "__main__":
    main()

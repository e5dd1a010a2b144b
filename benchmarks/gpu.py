"""Decoding on a GPU beside transformers: ``python -m benchmarks.gpu MODEL PROMPTS --adapter DIR --json FILE``.

PROMPTS is a file of ``benchmarks.chat_drafts prompts``. Our methods run as recorded graphs (``--kernels graphs``), and
plain decoding also launch by launch (``--kernels torch``). transformers runs as it is, and with a static cache whose
steps PyTorch compiles and records. Everything is greedy and takes turns on every prompt; since transformers takes
longer, it answers fewer of them, in a comparison of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks.chat_drafts import answered, report_of
from benchmarks.result_files import write_report
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, System
from vivace.evaluate.peers import TransformersPeer
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes, read_bandwidth
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Prompt, load_prompts


def transformers_systems(folder: Path, tokens: int, longest: BenchmarkPrompt) -> list[System]:
    """Load transformers twice, once with a static cache as long as the longest prompt needs, whose steps are compiled.

    Args:
        folder: the checkpoint.
        tokens: length limit of an answer.
        longest: the prompt whose answer decides the length of the static cache, which is then used for all.
    """
    from transformers import AutoModelForCausalLM

    made: list[System] = []
    for name in ("transformers", "transformers, compiled"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
        model.generation_config = copy.deepcopy(model.generation_config)
        peer = TransformersPeer("transformers", model, tokens)
        if name != "transformers":
            model.generation_config.cache_implementation = "static"
            for _ in range(2):
                peer.answer([longest])
        made.append(Named(name, peer))
    return made


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure our methods, then some of the prompts with transformers beside them; return the report."""
    kinds = {
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["kind"]: folder for folder in asked.adapter
    }
    load = partial(vivace.load, asked.model, adapters=kinds, device="cuda", dtype="bfloat16")
    graphs = load(kernels="graphs")
    rows: list[Prompt] = load_prompts(asked.prompts)
    written: dict[str, Any] = {
        "provenance": asdict(provenance(torch.device("cuda"))),
        "model": asked.model.name,
        "tokens": asked.max_new_tokens,
        "kernels": "graphs",
        "threads": torch.get_num_threads(),
        "remembered": False,
        "pass_bytes": pass_bytes(graphs.model),
        "bytes_per_s": read_bandwidth(torch.device("cuda"), num_bytes=1 << 31),
        "adapters": {
            kind: json.loads((folder / "config.json").read_text(encoding="utf-8"))["plan"]
            for kind, folder in kinds.items()
        },
        "beside": [],
    }
    methods = [MethodSystem(name, graphs, asked.max_new_tokens) for name in asked.methods]
    written["report"] = report_of(graphs, rows, asked, partial(_always, methods))
    write_report(asked.json, written)
    if asked.peers:
        by_launch = Named("plain, launch by launch", MethodSystem("plain", load(kernels="torch"), asked.max_new_tokens))
        few = argparse.Namespace(**{**vars(asked), "limit": asked.peers})
        chosen = [row for task in dict.fromkeys(row.task for row in rows) for row in _of(rows, task)[: asked.peers]]
        longest = max(answered(graphs, chosen, asked.max_new_tokens), key=lambda prompt: len(prompt.token_ids))
        others = transformers_systems(asked.model, asked.max_new_tokens, longest)
        written["beside"] = report_of(graphs, chosen, few, partial(_always, [*methods, by_launch, *others]))
        write_report(asked.json, written)
    return written


def _always(systems: Sequence[System], temperature: float) -> Sequence[System]:
    return systems


def _of(rows: Sequence[Prompt], task: str | None) -> list[Prompt]:
    return [row for row in rows if row.task == task]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="draft weights, repeatable")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["plain", "lookup"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10, help="prompts of each category")
    parser.add_argument("--peers", type=int, default=1, help="prompts of each category that transformers answers too")
    parser.add_argument("--tokens", dest="max_new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    asked.temperatures = [0.0]
    measure(asked)


if __name__ == "__main__":
    main()

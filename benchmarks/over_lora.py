"""Draft for a LoRA: ``python -m benchmarks.over_lora MODEL [MODEL] --prompts FILE --json FILE``.

Every model stands as ``FOLDER=LORA``: a checkpoint, and a LoRA of it with draft weights that were trained over it
(``LORA/drafting/METHOD``). One engine answers the same prompts, one at a time, with the LoRA worn:

* plainly,
* with the drafts that were trained over the LoRA,
* with the drafts of the base, which know nothing of it.

Ways take turns in an order that is drawn anew for every repeat. The report has tokens per second after the first token,
the ratio to plain decoding of each repeat, tokens per pass of the model, and how many texts differ from plain's, which
must be none. How good the adapted model's answers are is not measured here.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.adapters.lora import draft_weights_of
from vivace.checkpoint.lora_config import CONFIG
from vivace.checkpoint.peft import TENSORS
from vivace.engine import Engine
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.prompts import load_prompts

WAYS = {"plain": ("plain", "own"), "own drafts": ("multirate", "own"), "drafts of the base": ("multirate", "bare")}
"""Method and LoRA of each way; "bare" is the LoRA without the drafts trained over it."""


class Contest:
    """Ways to answer the same prompts with one engine that wears a LoRA."""

    def __init__(self, engine: Engine, prompts: list[str], tokens: int) -> None:
        """Answer each prompt with at most ``tokens`` new tokens, greedily."""
        self.engine = engine
        self.prompts = prompts
        self.settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
        self.texts: dict[str, list[tuple[int, ...]]] = {}
        self.per_pass: dict[str, float] = {}

    def speed(self, way: str) -> float:
        """Answer all prompts in a way; return the tokens per second after the first tokens."""
        method, adapter = WAYS[way]
        found = [self.engine.generate(p, adapter=adapter, method=method, **self.settings)[0] for p in self.prompts]
        stats = [result.stats for result in found]
        self.texts[way] = [result.token_ids for result in found]
        steps = sum(each.num_spec_steps for each in stats)
        self.per_pass[way] = sum(each.num_tokens for each in stats) / steps if steps else 1.0
        return sum(each.num_tokens - each.num_first_tokens for each in stats) / sum(each.decode_s for each in stats)


def measure(model: Path, lora: Path, prompts: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one model; see the module."""
    if not draft_weights_of(lora):
        raise SystemExit(f"{lora} has no draft weights: vivace train multirate --adapter {lora} --data FILE")
    speeds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for name in (CONFIG, TENSORS):
            shutil.copyfile(lora / name, Path(folder) / name)
        engine = vivace.load(model, dtype="bfloat16", kernels=asked.kernels, adapters={"own": lora, "bare": folder})
        contest, draws = Contest(engine, prompts, asked.tokens), random.Random(0)
        for way in WAYS:
            contest.speed(way)
        with watched_others() as others:
            for _ in range(asked.repeats):
                for way in draws.sample(list(WAYS), len(WAYS)):
                    speeds[way].append(contest.speed(way))
    ratios = {way: [a / b for a, b in zip(found, speeds["plain"], strict=True)] for way, found in speeds.items()}
    return {
        "setting": {
            "model": model.name, "lora": lora.name, "prompts": len(prompts), "new_tokens": asked.tokens,
            "repeats": asked.repeats, "kernels": engine.kernels.name, "others_cpu_share": others.cpu_share,
        },
        "tokens_per_s": {way: statistics.median(speeds[way]) for way in WAYS},
        "ratios": {way: statistics.median(ratios[way]) for way in WAYS},
        "ratio_ranges": {way: [min(ratios[way]), max(ratios[way])] for way in WAYS},
        "tokens_per_pass": {way: contest.per_pass[way] for way in WAYS},
        "num_different": {
            way: sum(a != b for a, b in zip(contest.texts[way], contest.texts["plain"], strict=True)) for way in WAYS
        },
    }  # fmt: skip


def tables(folder: Path) -> str:
    """Return one table for each model that was measured."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    parts = []
    for report in written["reports"]:
        s = report["setting"]
        parts.append(
            f"**{s['model']}** with the LoRA `{s['lora']}` worn, bfloat16, {s['prompts']} prompts of "
            f"{written['data']}, one at a time, at most {s['new_tokens']} tokens, {s['repeats']} repeats in turns; "
            f"{captions.machine(written['provenance'], s['kernels'])}{captions.others(s)}."
        )
        rows = []
        for way, speed in report["tokens_per_s"].items():
            low, high = report["ratio_ranges"][way]
            ratio = f"{report['ratios'][way]:.2f}x ({low:.2f} to {high:.2f})"
            same = f"{s['prompts'] - report['num_different'][way]} of {s['prompts']}"
            rows.append((way, f"{speed:.0f}", ratio, f"{report['tokens_per_pass'][way]:.2f}", same))
        parts.append(table(("", "tokens a second", "beside plain", "tokens a pass", "texts as plain's"), rows))
    return parts


def pair(word: str) -> tuple[Path, Path]:
    """Parse ``FOLDER=LORA``."""
    folder, equals, lora = word.partition("=")
    if not (folder and equals and lora):
        raise argparse.ArgumentTypeError(f"FOLDER=LORA is needed, found {word}")
    return Path(folder), Path(lora)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pair, nargs="+", metavar="FOLDER=LORA")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt file that nothing was trained on")
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prompts = [str(prompt.request) for prompt in load_prompts(asked.prompts)[: asked.limit]]
    report = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "data": asked.prompts.stem,
        "reports": [measure(model, lora, prompts, asked) for model, lora in asked.model],
    }
    print(json.dumps(report["reports"], indent=1), flush=True)
    if asked.json is not None:
        write_report(asked.json, report)


if __name__ == "__main__":
    main()

"""What a feature of an assistant keeps on a base in few bits: LoRAs for four of them, trained alike on both bases.

    python -m benchmarks.features train MODEL --stored M --data DIR --text FILE --work WORK
    python -m benchmarks.features measure MODEL --stored M --data DIR --work WORK --json FILE

The experiment after Apple's foundation models (arXiv:2407.21075, section 5): MODEL is M in few bits. Its recovery
adapter is trained on ``--text`` to have M's distribution, and the LoRA of each feature begins there. Beside it stand
the same training begun from zero, and the same on M itself, whose quality is to be kept; ``--ways`` leaves one of the
first two out, ``--features`` some features. ``--data`` has what ``vivace data e2e|wikisql|snips|clinc`` writes; of the
train files every training sees the same rows in the same order, and takes as many steps.

Several ``train`` on one machine share the work: each takes the next training that nobody holds, and one that was
killed goes on. Answers are greedy. Intervals are of the ratio to M with the feature's own LoRA, prompts drawn with
replacement.
"""

from __future__ import annotations

import argparse
import fcntl
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vivace
from benchmarks import captions
from benchmarks.palette_quality import bits_of
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.engine import Engine
from vivace.evaluate.overlap import bleu
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import score
from vivace.prompts import Prompt, load_prompts, save_prompts

WEIGHTS = "adapter_model.safetensors"
RECOVERY = "recovery"
STORED, ZERO, BEGUN = "stored", "from-zero", "from-recovery"
TITLES = {STORED: "stored", ZERO: "few bits, from zero", BEGUN: "few bits, from recovery"}
BASES = {STORED: "stored", ZERO: "few", BEGUN: "few"}
JUDGED = (ZERO, BEGUN)
"""Ways on few bits, whose share of the stored model's quality is told."""
DRAWS = 300
AT_ONCE = 8


@dataclass(frozen=True)
class Feature:
    """A task of an assistant, and by what its answers are judged."""

    name: str
    metric: str
    whole: float
    """What the metric is where every answer is right."""
    longest: int
    """Tokens of an answer at most."""


FEATURES = (
    Feature("e2e", "bleu", 100, 80),
    Feature("wikisql", "exact_match", 1, 72),
    Feature("snips", "slot_f1", 1, 96),
    Feature("clinc", "exact_match", 1, 12),
)


@dataclass(frozen=True)
class Training:
    """A LoRA that is to be trained."""

    out: Path
    model: Path
    data: Path
    changes: tuple[str, ...]
    recipe: str = "lora"
    needs: Path | None = None
    """The LoRA that it begins with."""

    def is_done(self) -> bool:
        """Return whether its weights are written."""
        return (self.out / WEIGHTS).is_file()

    def run(self) -> None:
        """Train in a process of its own, which goes on with what a killed one has left."""
        command = [sys.executable, "-m", "vivace", "train", self.recipe, *self.changes]
        command += ["--model", str(self.model), "--data", str(self.data), "--out", str(self.out)]
        subprocess.run(command, check=True)


def trainings(given: argparse.Namespace) -> list[Training]:
    """Return all trainings, those first that others begin with."""
    shared = (
        f"loop.steps={given.steps}",
        "loop.minutes=null",
        f"loop.warmup_steps={max(1, given.steps // 10)}",
        f"loop.evaluate_steps={given.steps}",
        "held_back=32",
        f"tokens_per_batch={given.batch}",
        "longest=192",
    )
    found = []
    for rank in given.ranks:
        at = given.work / f"rank-{rank}"
        recovery = at / RECOVERY
        recovering = (*shared, f"loop.steps={given.recovery_steps}", f"rank={rank}", f"stored={given.stored}")
        if BEGUN in given.ways:
            found.append(Training(recovery, given.model, given.text, recovering, "recover"))
        for feature in features_of(given):
            rows = given.work / "rows" / f"{feature.name}-train.jsonl"
            begun = (*shared, f"init={recovery}")
            found.append(Training(at / STORED / feature.name, given.stored, rows, (*shared, f"rank={rank}")))
            if ZERO in given.ways:
                found.append(Training(at / ZERO / feature.name, given.model, rows, (*shared, f"rank={rank}")))
            if BEGUN in given.ways:
                found.append(Training(at / BEGUN / feature.name, given.model, rows, begun, needs=recovery))
    return sorted(found, key=lambda each: each.needs is not None)


def features_of(given: argparse.Namespace) -> list[Feature]:
    """Return the features that were asked for."""
    return [each for each in FEATURES if each.name in given.features]


def train(given: argparse.Namespace) -> None:
    """Train all that nobody else trains."""
    write_rows(given)
    todo = trainings(given)
    while waiting := [each for each in todo if not each.is_done()]:
        for each in waiting:
            if each.needs is None or (each.needs / WEIGHTS).is_file():
                each.out.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{each.out}.lock", "w", encoding="utf-8") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    if not each.is_done():
                        print(each.out, flush=True)
                        each.run()
                        break
        else:
            time.sleep(5)


def write_rows(given: argparse.Namespace) -> None:
    """Write the rows that the trainings see, each with its feature's name in the place of the system's text."""
    for feature in features_of(given):
        path = given.work / "rows" / f"{feature.name}-train.jsonl"
        if not path.is_file():
            rows = load_prompts(given.data / f"{feature.name}-train.jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            save_prompts(path, [asked(row) for row in drawn(rows, given.rows)])


def drawn(rows: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return so many of the rows."""
    return random.Random(0).sample(rows, min(count, len(rows)))


def asked(row: Prompt) -> Prompt:
    """Return a row as a conversation, whose system's text is the task: the model's own one is longer than most rows."""
    turns = [{"role": "system", "content": str(row.task)}, {"role": "user", "content": str(row.request)}]
    return Prompt(turns, row.references, row.task)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Answer the development rows of every feature with every LoRA, and return what the answers are worth."""
    loras: dict[str, dict[str, Path]] = {"stored": {}, "few": {}}
    for rank in given.ranks:
        at = given.work / f"rank-{rank}"
        loras["few"] |= {f"{rank}-{RECOVERY}": at / RECOVERY} if BEGUN in given.ways else {}
        for way in (STORED, *given.ways):
            loras[BASES[way]] |= {f"{rank}-{way}-{each.name}": at / way / each.name for each in features_of(given)}
    engines = {
        "stored": vivace.load(given.stored, adapters=loras["stored"]),
        "few": vivace.load(given.model, adapters=loras["few"]),
    }
    features = {}
    for feature in features_of(given):
        rows = drawn(load_prompts(given.data / f"{feature.name}-dev.jsonl"), given.limit)
        texts = {}
        for name, base, adapter in systems(feature, given.ranks, given.ways):
            texts[name] = answers(engines[base], feature, rows, adapter)
            print(feature.name, name, score(rows, texts[name]), flush=True)
        features[feature.name] = {
            "rows": len(rows),
            "metric": feature.metric,
            "whole": feature.whole,
            "systems": judged(feature, rows, texts, given.ranks, given.ways),
        }
    first = Path(STORED, features_of(given)[0].name, WEIGHTS)
    adapter_bytes = {rank: (given.work / f"rank-{rank}" / first).stat().st_size for rank in given.ranks}
    return {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "kernels": engines["few"].kernels.name,
        "features": {
            "model": given.stored.name,
            "rounded": given.model.name,
            **bits_of(given.model),
            "steps": given.steps,
            "recovery_steps": given.recovery_steps,
            "tokens_per_step": given.batch,
            "ranks": list(given.ranks),
            "adapter_bytes": adapter_bytes,
            "features": features,
        },
    }


def systems(feature: Feature, ranks: Sequence[int], ways: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name of every row of the table, its base and its LoRA."""
    yield "stored, no LoRA", "stored", None
    yield "few bits, no LoRA", "few", None
    for rank in ranks:
        if BEGUN in ways:
            yield f"few bits, recovery of rank {rank} alone", "few", f"{rank}-{RECOVERY}"
        for way in (STORED, *ways):
            yield f"{TITLES[way]}, rank {rank}", BASES[way], f"{rank}-{way}-{feature.name}"


def answers(engine: Engine, feature: Feature, rows: Sequence[Prompt], adapter: str | None) -> list[str]:
    """Return the greedy answers to all rows, in their order."""
    texts: list[str] = []
    for first in range(0, len(rows), AT_ONCE):
        group = [asked(row).request for row in rows[first : first + AT_ONCE]]
        texts += [
            each.text
            for each in engine.generate(group, adapter=adapter, method="plain", max_new_tokens=feature.longest)
        ]
    return texts


def judged(
    feature: Feature,
    rows: Sequence[Prompt],
    texts: Mapping[str, Sequence[str]],
    ranks: Sequence[int],
    ways: Sequence[str],
) -> dict[str, Any]:
    """Return what each system's answers are worth, and of it the share of M's with a LoRA of that rank."""
    generator = np.random.default_rng(0)
    draws = generator.integers(len(rows), size=(DRAWS, len(rows)))
    values = {name: value(feature, rows, found) for name, found in texts.items()}
    compared = [f"{TITLES[way]}, rank {rank}" for way in (STORED, *ways) for rank in ranks]
    redrawn = {
        name: np.array([value(feature, [rows[at] for at in draw], [texts[name][at] for at in draw]) for draw in draws])
        for name in compared
    }
    result: dict[str, Any] = {name: {"value": found} for name, found in values.items()}
    for rank in ranks:
        beside = f"{TITLES[STORED]}, rank {rank}"
        for way in ways:
            name = f"{TITLES[way]}, rank {rank}"
            low, high = np.percentile(redrawn[name] / np.maximum(redrawn[beside], 1e-9), [2.5, 97.5])
            kept = values[name] / values[beside] if values[beside] else 0.0
            result[name]["kept"] = {"estimate": kept, "low": float(low), "high": float(high)}
    return result


def value(feature: Feature, rows: Sequence[Prompt], texts: Sequence[str]) -> float:
    """Return the metric of a feature; BLEU alone where it is that, since the other scores of such texts take longer."""
    if feature.metric == "bleu":
        return bleu(texts, [row.references for row in rows])
    return float(score(rows, texts)[feature.name][feature.metric])


def tables(folder: Path) -> str:
    """Return the table of every result file of a folder."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    found = written["features"]
    features = found["features"]
    caption = (
        f"**{found['model']}** and `{found['rounded']}`, its matrices in {found['matrix_bits']:.2f} bits a weight; "
        f"every LoRA {found['steps']} steps of at most {found['tokens_per_step']} tokens, the recovery adapter "
        f"{found['recovery_steps']} before them; development rows: "
        + ", ".join(f"{name} {each['rows']}" for name, each in features.items())
        + ". In brackets: the share of what the stored model reaches with its own LoRA, 95 % interval. "
        f"{captions.machine(written['provenance'], written['kernels'])}."
    )
    heads = ("", *(f"{name}, {each['metric'].replace('_', ' ')}" for name, each in features.items()))
    names = next(iter(features.values()))["systems"]
    rows = [(name, *(_cell(each["systems"][name], each["whole"]) for each in features.values())) for name in names]
    return [caption, table(heads, rows)]


def _cell(one: Mapping[str, Any], whole: float) -> str:
    text = f"{100 * one['value'] / whole:.1f}"
    if "kept" in one:
        kept = one["kept"]
        text += f" ({kept['estimate']:.2f}; {kept['low']:.2f} to {kept['high']:.2f})"
    return text


def main() -> None:
    """Train, or measure and write a result file."""
    names = [each.name for each in FEATURES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("model", type=Path, help="checkpoint in few bits")
    parser.add_argument("--stored", type=Path, required=True, help="the model that it was made of")
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--text", type=Path, help="what the recovery adapter learns from")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--features", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=JUDGED, default=JUDGED, metavar="WAY")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--recovery-steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=512, help="tokens of a step")
    parser.add_argument("--rows", type=int, default=8000, help="train rows of each feature")
    parser.add_argument("--limit", type=int, default=200, help="development rows of each feature")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.what == "train":
        if given.text is None and BEGUN in given.ways:
            parser.error("train needs --text, from which the recovery adapter learns")
        train(given)
        return
    if given.json is None:
        parser.error("measure needs --json")
    report = measure(given)
    write_report(given.json, report)
    print("\n\n".join(_tables(report)))


if __name__ == "__main__":
    main()

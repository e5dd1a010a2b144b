"""Measure one training step with clustered matrices beside one without: peak memory and seconds, a process for each.

    python -m benchmarks.palette_step --model 360M --tokens 2048 --out benchmarks/results/clustering/step-360M.json

Both train all matrices of the layers of a Llama with drawn weights to have the distribution of the stored model, with
the same loss, text and optimiser: one those matrices as they are, the other with values that are clustered
(``vivace train palette``). The first step allocates what later ones use again, so the steps after it are timed; the
peak is that of all steps, the models included, and not of what making them took.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.kernels import _random_llama
from benchmarks.peers import SHAPES
from benchmarks.result_files import write_report
from vivace.core.model import Decoder
from vivace.evaluate.memory import peak_memory
from vivace.evaluate.provenance import provenance
from vivace.kernels.coded import PaletteCodes
from vivace.kernels.reference import any_order
from vivace.palette.rounding import round_matrix
from vivace.palette.statistics import matrices
from vivace.palette.training import ClusteringObjective, PaletteObjective, with_clusters
from vivace.train.data import Row, TokenBatch, collate
from vivace.train.distillation import DistillationLoss
from vivace.train.optim import Optimiser, OptimiserConfig

KINDS = ("plain", "clustered")
ROW = 256
"""Tokens of a row of the batch."""


class PlainObjective(PaletteObjective):
    """Trains the matrices of a decoder as they are, with the loss that clustered ones have."""

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the matrices of the layers."""
        return [{"name": name, "params": [part.weight]} for name, part in matrices(self.student).items()]


def main() -> None:
    """Measure both and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="360M", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer layers, for trying")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps after the first")
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    options = parser.parse_args()
    shape = dict(SHAPES[options.model])
    shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
    setting = {name: getattr(options, name) for name in ("model", "tokens", "bits", "steps")}
    setting |= {"layers": shape["num_hidden_layers"], "threads": torch.get_num_threads()}
    found = {kind: in_a_process(kind, shape, setting) for kind in KINDS}
    for kind, cost in found.items():
        print(kind, cost)
    for name in ("peak_bytes", "seconds"):
        print(f"{name}: {found['clustered'][name] / found['plain'][name]:.2f}x")
    result = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "steps": found}
    write_report(options.out, result)


def in_a_process(kind: str, shape: dict[str, int], setting: Mapping[str, Any]) -> dict[str, float]:
    """Return peak and seconds of steps that a new process makes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, kind, shape, setting))
    process.start()
    sender.close()
    try:
        found: dict[str, float] = receiver.recv()
    except EOFError as error:
        process.join()
        raise SystemExit(f"the {kind} step ended early (exit {process.exitcode}), most likely for memory") from error
    process.join()
    return found


def _send(sender: Connection, kind: str, shape: dict[str, int], setting: Mapping[str, Any]) -> None:
    torch.set_num_threads(setting["threads"])
    sender.send(measure(kind, shape, setting))


def measure(kind: str, shape: dict[str, int], setting: Mapping[str, Any]) -> dict[str, float]:
    """Return the most memory that steps of one kind need, in bytes, and the median seconds of one."""
    stored = _random_llama(shape).float()
    student = copy.deepcopy(stored)
    objective = objective_of(kind, student, setting["bits"])
    optimiser = Optimiser(objective.groups(), OptimiserConfig(adamw_rate=1e-3))
    batch = drawn_batch(shape["vocab_size"], setting["tokens"])
    seconds = []
    with peak_memory(torch.device("cpu")) as peak:
        for _ in range(setting["steps"] + 1):
            began = time.perf_counter()
            make_step(objective, optimiser, stored, batch)
            seconds.append(time.perf_counter() - began)
    return {"peak_bytes": peak.num_bytes or 0, "seconds": statistics.median(seconds[1:] or seconds)}


def objective_of(kind: str, student: Decoder, bits: int) -> PaletteObjective:
    """Return what a step minimises; clustered matrices begin at even steps, which are found at once."""
    weights = {name: part.weight.detach() for name, part in matrices(student).items()}
    if kind == "plain":
        for part in matrices(student).values():
            part.weight = nn.Parameter(part.weight.detach())
        return PlainObjective(student, {}, DistillationLoss())
    codes = {name: round_matrix(weight, bits, "rtn") for name, weight in weights.items()}
    palettes = {name: each for name, each in codes.items() if isinstance(each, PaletteCodes)}
    parts = with_clusters(student, weights, palettes, 1)
    return ClusteringObjective(student, parts, DistillationLoss(), (0.1, 0.01), 100)


def drawn_batch(vocab_size: int, tokens: int) -> TokenBatch:
    """Return rows of drawn tokens, all of them scored."""
    drawn = torch.randint(vocab_size, (max(1, tokens // ROW), min(tokens, ROW)), generator=torch.manual_seed(1))
    return collate([Row(tuple(row), 1) for row in drawn.tolist()])


def make_step(objective: PaletteObjective, optimiser: Optimiser, stored: Decoder, batch: TokenBatch) -> None:
    """Make one step of training."""
    with any_order():
        for loss, _ in objective.losses(stored, batch):
            loss.backward()
    optimiser.update(1.0)
    objective.updated()


if __name__ == "__main__":
    main()

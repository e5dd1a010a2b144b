"""How long ways to share a prompt would take on other machines: events of every layer, from a few coefficients.

    python -m benchmarks.rank_simulator --measured benchmarks/results/parallel/two-ranks.json --out FILE

Coefficients of this machine are those that a bench measured at its start; times of the bench itself are only compared.
Files have ``is_simulated``, and what makes tables refuses to put them beside measured ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.parallel_tables import cells_of
from vivace.parallel.partition import Costs, balanced, even

GRID = 256
JITTER = 0.2
"""Largest share by which one transfer may take longer."""


@dataclass(frozen=True)
class Machine:
    """Ranks that are all alike, and their links."""

    name: str
    costs: Costs
    """Of one rank, in seconds."""
    row_s: float
    """Sending what a rank adds to the sum of one row."""
    is_dense: bool = False
    """Whether attention computes every pair of a rectangle, as without causal kernels, in the chain, too."""


def runahead_s(counts: Sequence[int], machine: Machine, late: Callable[[], float]) -> float:
    """Return the time of a chain; ``late`` gives the factor of each transfer."""
    costs, offsets = machine.costs, [0, *accumulate(counts)]
    passed = [0.0] * costs.num_layers
    for place, count in enumerate(counts):
        begun = arrived = 0.0
        seen = offsets[place] + (count if machine.is_dense else count / 2)
        for layer in range(costs.num_layers):
            if place:
                sending = (costs.latency_s + offsets[place] * costs.entry_s) * late()
                arrived = max(passed[layer], arrived) + sending
            passed[layer] = max(begun + costs.project_s * count, arrived)
            begun = passed[layer] + costs.attend_s * count * seen + costs.feed_s * count
    return passed[-1]


def sequence_s(counts: Sequence[int], machine: Machine, late: Callable[[], float], *, is_dense: bool) -> float:
    """Return the time with entries gathered in every layer; all wait for the slowest transfer."""
    costs, total, offsets = machine.costs, sum(counts), [0, *accumulate(counts)]
    begun, meeting = [0.0] * len(counts), 0.0
    for _ in range(costs.num_layers):
        ready = max(at + costs.project_s * count for at, count in zip(begun, counts, strict=True))
        sending = costs.latency_s + (total - min(counts)) * costs.entry_s
        meeting = ready + max(sending * late() for _ in counts)
        for place, count in enumerate(counts):
            seen = total if is_dense else offsets[place] + count / 2
            begun[place] = meeting + costs.attend_s * count * seen + costs.feed_s * count
    return meeting


def tensor_s(length: int, num_ranks: int, machine: Machine, late: Callable[[], float]) -> float:
    """Return the time with every layer divided evenly and two sums in each of them."""
    costs, total = machine.costs, 0.0
    work = (costs.project_s + costs.feed_s) * length + costs.attend_s * length * length / 2
    parts = 1.0 if num_ranks == 2 else 2 * (num_ranks - 1) / num_ranks
    for _ in range(costs.num_layers):
        total += work / num_ranks
        total += sum((costs.latency_s + parts * machine.row_s * length) * late() for _ in range(2))
    return total


def pipeline_s(length: int, num_ranks: int, machine: Machine, late: Callable[[], float], chunk: int = GRID) -> float:
    """Return the time with layers divided among ranks and the prompt in chunks."""
    costs = machine.costs
    ended = [0.0] * num_ranks
    for first in range(0, length, chunk):
        count, arrived = min(chunk, length - first), 0.0
        work = (costs.project_s + costs.feed_s) * count + costs.attend_s * count * (first + count / 2)
        for stage in range(num_ranks):
            ended[stage] = max(ended[stage], arrived) + work * costs.num_layers / num_ranks
            arrived = ended[stage] + (costs.latency_s + machine.row_s * count) * late()
    return ended[-1]


def alone_s(length: int, machine: Machine) -> float:
    """Return the time of one rank."""
    costs = machine.costs
    seen = length if machine.is_dense else length / 2
    return costs.num_layers * ((costs.project_s + costs.feed_s) * length + costs.attend_s * length * seen)


def simulate(length: int, num_ranks: int, machine: Machine, *, jitter: float = 0.0, seed: int = 0) -> dict[str, float]:
    """Return the seconds of all ways; each transfer takes up to ``jitter`` longer, from a seed."""
    equal = even(length, num_ranks, GRID)
    pieces = balanced(length, num_ranks, GRID, machine.costs)

    def late() -> Callable[[], float]:
        numbers = random.Random(seed)
        return lambda: 1 + jitter * numbers.random()

    return {
        "one": alone_s(length, machine),
        "tensor": tensor_s(length, num_ranks, machine, late()),
        "sequence": sequence_s(equal, machine, late(), is_dense=True),
        "sequence-causal": sequence_s(equal, machine, late(), is_dense=False),
        "pipeline": pipeline_s(length, num_ranks, machine, late()),
        "runahead-even": runahead_s(equal, machine, late()),
        "runahead": min(runahead_s(counts, machine, late()) for counts in _shifted(pieces, length, num_ranks, machine)),
    }


def _shifted(pieces: Sequence[int], length: int, num_ranks: int, machine: Machine) -> list[list[int]]:
    """Return pieces to choose from: those of the causal model, and where attention is dense those that balance it."""
    if not machine.is_dense:
        return [list(pieces)]
    found = [list(pieces), even(length, num_ranks, GRID)]
    best = min(found, key=lambda counts: runahead_s(counts, machine, lambda: 1.0))
    for _ in range(40):
        moves = []
        for place in range(num_ranks - 1):
            for step in (-GRID, GRID):
                moved = list(best)
                moved[place] += step
                moved[place + 1] -= step
                if min(moved) > 0:
                    moves.append(moved)
        nearer = min(moves, key=lambda counts: runahead_s(counts, machine, lambda: 1.0))
        if runahead_s(nearer, machine, lambda: 1.0) >= runahead_s(best, machine, lambda: 1.0):
            break
        best = nearer
    return [best]


@dataclass(frozen=True)
class Shape:
    """A model as far as its cost goes."""

    name: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    num_matrices: int
    num_layers: int

    def machine(self, flops: float, bytes_per_s: float, attention: float) -> Machine:
        """Return the shape on a processor: ``attention`` is how many times its multiplications it costs."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        costs = Costs(
            project_s=2 * self.width * (query + 2 * keys) / flops,
            feed_s=2 * self.width * (query + self.num_matrices * self.ffn_width) / flops,
            attend_s=attention * 4 * query / flops,
            num_layers=self.num_layers,
            latency_s=20e-6,
            entry_s=4 * keys / bytes_per_s,
        )
        return Machine(self.name, costs, 2 * self.width / bytes_per_s, is_dense=True)


PAPER = (
    (Shape("Llama 7B", 4096, 32, 32, 128, 11008, 3, 32), 4, 12288, 300e9, 1.42),
    (Shape("Falcon 7B", 4544, 71, 1, 64, 18176, 2, 32), 8, 8192, 300e9, 1.63),
    (Shape("Llama 7B", 4096, 32, 32, 128, 11008, 3, 32), 4, 12288, 10e9, 1.79),
)
"""Cells whose ratios the KV-Runahead paper gives, the last as the best of a slow link, whichever cell that is."""
A100_FLOPS = 190e12
"""Multiplications and additions of a second in float16, a share of .6 of the peak."""


def papers() -> list[dict[str, Any]]:
    """Return simulated ratios on the paper's machines, with attention at its multiplications and at several times."""
    rows = []
    for shape, ranks, length, rate, told in PAPER:
        for attention in (1.0, 4.0, 8.0):
            found = simulate(length, ranks, shape.machine(A100_FLOPS, rate, attention))
            noisy = [
                simulate(length, ranks, shape.machine(A100_FLOPS, rate, attention), jitter=JITTER, seed=seed)
                for seed in range(5)
            ]
            rows.append(
                {
                    "model": shape.name,
                    "ranks": ranks,
                    "length": length,
                    "gigabytes_per_s": rate / 1e9,
                    "attention": attention,
                    "ratio": found["sequence"] / found["runahead"],
                    "paper": told,
                    "jitter_sequence": max(one["sequence"] for one in noisy) / found["sequence"] - 1,
                    "jitter_runahead": max(one["runahead"] for one in noisy) / found["runahead"] - 1,
                }
            )
    return rows


def compared(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return simulated and measured first tokens of all cells of a bench."""
    rows = []
    for cell in measured["cells"]:
        machine = machine_of(cell)
        for row in cell["rows"]:
            if row["what"] != "first token":
                continue
            found = simulate(row["num_tokens"] - 1, cell["link"]["ranks"], machine)
            if row["way"] in ("runahead", "runahead-model"):
                simulated = runahead_s(row["counts"], machine, lambda: 1.0)
            else:
                simulated = found.get(row["way"])
            if simulated is not None:
                rows.append(
                    {
                        "mbit": cell["link"]["mbit"],
                        "way": row["way"],
                        "length": row["num_tokens"],
                        "simulated_s": simulated,
                        "measured_s": row["median_s"],
                    }
                )
    return rows


def machine_of(cell: dict[str, Any]) -> Machine:
    """Return the machine of a measured cell, from the coefficients that were measured at its start."""
    costs = Costs(**cell["setting"]["costs"])
    return Machine("measured", costs, cell["setting"]["row_bytes"] / cell["setting"]["link"]["bytes_per_s"])


def more_ranks(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return times of 4 and 8 ranks of each measured machine."""
    rows = []
    for cell in measured["cells"]:
        machine = machine_of(cell)
        for ranks in (2, 4, 8):
            found = simulate(8184, ranks, machine)
            rows.append({"mbit": cell["link"]["mbit"], "ranks": ranks, "length": 8184, "seconds": found})
    return rows


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    measured = {"cells": cells_of(given.measured)}
    found = {
        "is_simulated": True,
        "provenance": measured["cells"][0]["provenance"],
        "compared": compared(measured),
        "more_ranks": more_ranks(measured),
        "papers": papers(),
    }
    given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

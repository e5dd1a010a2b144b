"""How long ways to share a prompt would take on other machines: events of every layer, from a few coefficients.

    python -m benchmarks.rank_simulator --measured benchmarks/results/parallel/two-ranks.json --out FILE

Coefficients of a rank are those that other runs on the same machine measured at their start, while all ranks computed
(for "one", while the others were idle); where there is no other run they are those of the run itself. The link is the
run's own. Times of benches are only compared.
Files have ``is_simulated``, and what makes tables refuses to put them beside measured ones.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.parallel_tables import cells_of
from benchmarks.result_files import write_report
from vivace.parallel import prediction
from vivace.parallel.auto import CHOSEN
from vivace.parallel.partition import Costs, balanced, even, first_token_s, punctual
from vivace.parallel.prediction import ShareWork, sent_of_sum, staged_s

GRID = 256
LINK_COSTS = ("latency_s", "entry_s", "entry_work_s", "sum_s", "sum_step_s")
"""Costs that depend on the link."""
JITTER = 0.2
"""Largest share by which one transfer may take longer."""


@dataclass(frozen=True)
class Machine:
    """Ranks that are all alike, and their links."""

    name: str
    costs: Costs
    """Of one rank, in seconds."""
    is_dense: bool = False
    """Whether attention computes every pair of a rectangle, as without causal kernels, in the chain and alone."""
    alone: Costs | None = None
    """Costs of a rank beside which the others are idle; None takes them for those of all."""
    num_ranks: int = 2
    """Number of ranks among which ``costs.sum_s`` was measured."""
    works: Mapping[int, Sequence[ShareWork]] = field(default_factory=dict)
    """Parts of the ranks where heads and columns are divided, by the number of ranks; without they are equal."""

    def attention_s(self, count: int, before: int) -> float:
        """Return the seconds of ``count`` tokens' attention behind ``before`` others."""
        if self.is_dense:
            return self.costs.attend_s * count * (before + count)
        return self.costs.attention_s(count, before)

    def parts(self, num_ranks: int) -> Sequence[ShareWork]:
        """Return the parts of so many ranks."""
        return self.works.get(num_ranks) or [ShareWork(1 / num_ranks, 1 / num_ranks, 0.0, 1 / num_ranks)] * num_ranks


def runahead_s(counts: Sequence[int], machine: Machine, late: Callable[[], float]) -> float:
    """Return the time of a chain; ``late`` gives the factor of each transfer."""
    return first_token_s(counts, machine.costs, attention_s=machine.attention_s, late=late)


def sequence_s(counts: Sequence[int], machine: Machine, late: Callable[[], float], *, is_dense: bool) -> float:
    """Return the time with entries gathered in every layer; all wait for the slowest transfer."""
    costs, total, offsets = machine.costs, sum(counts), [0, *accumulate(counts)]
    begun, meeting = [0.0] * len(counts), 0.0
    attending = [
        costs.masked_s(count, total) if is_dense else costs.attention_s(count, offsets[place])
        for place, count in enumerate(counts)
    ]
    for _ in range(costs.num_layers):
        ready = max(at + costs.project_s * count for at, count in zip(begun, counts, strict=True))
        sending = costs.latency_s + (total - min(counts)) * costs.entry_s
        meeting = ready + max(sending * late() for _ in counts)
        for place, count in enumerate(counts):
            begun[place] = meeting + attending[place] + costs.feed_s * count
    return meeting


def tensor_s(length: int, num_ranks: int, machine: Machine, late: Callable[[], float]) -> float:
    """Return the time with heads and columns divided and two sums in each layer, at which the later rank is awaited."""
    costs = machine.costs  # a sum is as it was measured, for as many rows as these ranks send
    share = sent_of_sum(num_ranks) / sent_of_sum(machine.num_ranks)
    costs = replace(costs, sum_s=costs.sum_s * share)
    return prediction.tensor_s(length, costs, machine.parts(num_ranks), late=late)


def alone_s(length: int, machine: Machine) -> float:
    """Return the time of one rank beside which the others are idle."""
    costs = machine.alone or machine.costs
    attention = costs.attend_s * length * length if machine.is_dense else costs.attention_s(length, 0)
    return costs.num_layers * ((costs.project_s + costs.feed_s) * length + attention)


def simulate(length: int, num_ranks: int, machine: Machine, *, jitter: float = 0.0, seed: int = 0) -> dict[str, float]:
    """Return the seconds of all ways; each transfer takes up to ``jitter`` longer, from a seed."""
    equal = even(length, num_ranks, GRID)
    pieces = balanced(length, num_ranks, GRID, machine.costs)

    def late() -> Callable[[], float]:
        numbers = random.Random(seed)
        return lambda: 1 + jitter * numbers.random()

    found = {
        "one": alone_s(length, machine),
        "tensor": tensor_s(length, num_ranks, machine, late()),
        "sequence": sequence_s(equal, machine, late(), is_dense=True),
        "sequence-causal": sequence_s(equal, machine, late(), is_dense=False),
        "pipeline": staged_s(length, num_ranks, machine.costs, gathers=False, late=late()),
        "pipeline-gathered": staged_s(length, num_ranks, machine.costs, gathers=True, late=late()),
        "runahead-even": runahead_s(equal, machine, late()),
        "runahead": min(runahead_s(counts, machine, late()) for counts in _shifted(pieces, length, num_ranks, machine)),
    }
    return {**found, "auto": min(found[way] for way in CHOSEN)}


def _shifted(pieces: Sequence[int], length: int, num_ranks: int, machine: Machine) -> list[list[int]]:
    """Return pieces to choose from: those of the causal model, and where attention is dense those that balance it."""
    if not machine.is_dense:
        return [list(pieces)]
    found = [list(pieces), even(length, num_ranks, GRID)]
    best = min(found, key=lambda counts: runahead_s(counts, machine, punctual))
    for _ in range(40):
        moves = []
        for place in range(num_ranks - 1):
            for step in (-GRID, GRID):
                moved = list(best)
                moved[place] += step
                moved[place + 1] -= step
                if min(moved) > 0:
                    moves.append(moved)
        nearer = min(moves, key=lambda counts: runahead_s(counts, machine, punctual))
        if runahead_s(nearer, machine, punctual) >= runahead_s(best, machine, punctual):
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
            row_bytes_s=2 * self.width / bytes_per_s,
        )
        return Machine(self.name, costs, is_dense=True)


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
        machine = machine_of(cell, measured["cells"])
        for row in cell["rows"]:
            if row["what"] != "first token":
                continue
            found = simulate(row["num_tokens"] - 1, cell["link"]["ranks"], machine)
            simulated: float | None
            if row["way"] in ("runahead", "runahead-model"):
                simulated = runahead_s(row["counts"], machine, punctual)
            else:
                simulated = found.get(row["way"])
            if simulated is not None:
                rows.append(
                    {
                        "mbit": cell["link"]["mbit"],
                        "ranks": cell["link"]["ranks"],
                        "way": row["way"],
                        "length": row["num_tokens"],
                        "simulated_s": simulated,
                        "measured_s": row["median_s"],
                    }
                )
    return rows


def machine_of(cell: dict[str, Any], cells: Sequence[dict[str, Any]] = ()) -> Machine:
    """Return the machine of a measured cell: its own link, and ranks as other cells of that machine have them."""
    setting = cell["setting"]
    others = [one["setting"] for one in cells if one is not cell and place_of(one) == place_of(cell)]
    seconds_per_byte = 1 / setting["link"]["bytes_per_s"]
    link = {name: setting["costs"].get(name, 0.0) for name in LINK_COSTS}
    link["row_bytes_s"] = setting["row_bytes"] * seconds_per_byte

    def costs(kind: str) -> Costs:
        found = [one[kind] for one in others if one.get(kind)] or [setting.get(kind) or setting["costs"]]
        return Costs(**{**{name: median_of([one.get(name, 0.0) for one in found]) for name in found[0]}, **link})

    works = {int(ranks): [ShareWork(**work) for work in found] for ranks, found in (setting.get("works") or {}).items()}
    return Machine(
        "measured",
        costs("costs"),
        alone=costs("alone"),
        num_ranks=cell["link"]["ranks"],
        works=works,
    )


def place_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return what coefficients of a rank are valid for."""
    setting, link = cell["setting"], cell["link"]
    kind = (setting["model"], setting["kernels"], setting["dtype"], "alone" in setting)
    return (cell["provenance"]["cpu"], *kind, link["ranks"], link["cpu_share"])


def median_of(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each number of equally long lists of points; counts stay whole."""
    if isinstance(values[0], list | tuple):
        return tuple(median_of(each) for each in zip(*values, strict=True))
    return statistics.median_low(values) if isinstance(values[0], int) else statistics.median(values)


def more_ranks(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return times of 2, 4 and 8 ranks of a whole core on each link, from the run with the longest prompts there."""
    rows = []
    whole = [cell for cell in measured["cells"] if cell["link"]["cpu_share"] == 1]
    longest = sorted(whole, key=lambda cell: max(row["num_tokens"] for row in cell["rows"]))
    for cell in {cell["link"]["mbit"]: cell for cell in longest}.values():
        machine = machine_of(cell, measured["cells"])
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
    write_report(given.out, found)


if __name__ == "__main__":
    main()

"""Measure what clustering a matrix keeps for the backward pass and how far its process grows, beside coremltools.

    python -m benchmarks.clustering_memory --out 4096x4096.json

The rows of ``vivace bench palette``, the hooks on several ranks of gloo, which share what they keep, and, where it is
installed, DKM of coremltools (Cho et al. 2022, arXiv:2108.12659) with as many rounds. Its own hooks (eDKM) ask for CUDA
and are not measured. Every row is a process of its own, or one for each rank.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.result_files import write_report
from vivace.evaluate.clustering import ClusteringCost, clustering_cost, in_processes, pass_cost, random_matrix
from vivace.evaluate.provenance import provenance
from vivace.kernels.heap import trimmer
from vivace.palette.clustering import MODES, cluster

BITS, ROUNDS = 3, 3


def main() -> None:
    """Measure every row and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), help="outputs and inputs of the matrix")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of processes that share hooks")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    shape = tuple(options.shape)
    setting = {"shape": list(shape), "bits": BITS, "rounds": ROUNDS, "threads": 1}
    costs: list[ClusteringCost] = []
    report = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting}
    for cost in every_cost(shape, options.ranks):
        print(cost, flush=True)
        costs.append(cost)
        write_report(options.out, {**report, "costs": [asdict(each) for each in costs]})


def every_cost(shape: tuple[int, int], ranks: Sequence[int]) -> Iterator[ClusteringCost]:
    """Yield the cost of each row of the table, as soon as it is measured."""
    for rows in (None, 16):
        for mode in reversed(MODES):
            yield clustering_cost(shape, BITS, rows, ROUNDS, mode, threads=1)
        for count in ranks:
            yield on_ranks(shape, rows, count)
        if find_spec("coremltools") is None:
            print("coremltools is not installed, and has no row")
        else:
            yield in_processes("coremltools", of_coremltools, shape, rows, threads=1)[0]


def on_ranks(shape: tuple[int, int], rows: int | None, num_ranks: int) -> ClusteringCost:
    """Return the cost of the hooks on several ranks, of the rank where each number is largest."""
    what = f"hooks, {num_ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        found = in_processes(what, _of_rank, shape, rows, num_ranks, meeting, threads=1, count=num_ranks)
    kept, peak, forward, backward = (max(column) for column in zip(*map(_numbers, found), strict=True))
    return ClusteringCost(what, rows, kept, peak, forward, backward)


def _numbers(cost: ClusteringCost) -> tuple[int, int, float, float]:
    return cost.kept_bytes, cost.peak_bytes, cost.forward_s, cost.backward_s


def of_coremltools(shape: tuple[int, int], rows: int | None) -> ClusteringCost:
    """Measure DKM of coremltools; its first centroids are found before, by a pass that is not measured."""
    from coremltools.optimize.torch.palettization import (  # type: ignore[import-not-found]
        DKMPalettizer,
        DKMPalettizerConfig,
        ModuleDKMPalettizerConfig,
    )

    weight = random_matrix(shape)
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight.detach()
    config = ModuleDKMPalettizerConfig(
        n_bits=BITS,
        cluster_dim=1,
        weight_threshold=0,
        kmeans_max_iter=ROUNDS,
        palett_epsilon=0.0,
        granularity="per_tensor" if rows is None else "per_grouped_channel",
        group_size=rows,
    )
    palettizer = DKMPalettizer(torch.nn.Sequential(linear), DKMPalettizerConfig(global_config=config))
    module = palettizer.prepare(inplace=True)[0]
    palettizer.step()
    module.train()
    with torch.no_grad():
        module.weight_fake_quant(module.weight)
    if (trim := trimmer()) is not None:
        trim(0)  # what that pass has freed is not there for the next to use
    return pass_cost("coremltools DKM", rows, module.weight, lambda: module.weight_fake_quant(module.weight))


def _of_rank(shape: tuple[int, int], rows: int | None, num_ranks: int, meeting: str, rank: int) -> ClusteringCost:
    torch.distributed.init_process_group("gloo", init_method=meeting, world_size=num_ranks, rank=rank)
    group, weight = torch.distributed.group.WORLD, random_matrix(shape)
    small = weight[:16, :64].detach().requires_grad_()
    cluster(small, BITS, rows=16, rounds=1, mode="hooks", group=group)  # what PyTorch sets up once
    cost = pass_cost(
        "hooks", rows, weight, lambda: cluster(weight, BITS, rows=rows, rounds=ROUNDS, mode="hooks", group=group)
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return cost


if __name__ == "__main__":
    main()

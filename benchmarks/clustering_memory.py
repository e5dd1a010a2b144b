"""Measure what clustering a matrix keeps for the backward pass and how far its process grows, beside coremltools.

    python -m benchmarks.clustering_memory --out 4096x4096.json

The rows of ``vivace bench palette``, the hooks on several ranks of gloo, which share what they keep, and, where it is
installed, DKM of coremltools (Cho et al. 2022, arXiv:2108.12659) with as many rounds. Its own hooks (eDKM) ask for CUDA
and are not measured. Every row is a process of its own, or one for each rank. Peaks of these rows are counted from what
the process has before the pass, without a smaller pass before it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.result_files import write_report
from vivace.errors import CapacityError
from vivace.evaluate.clustering import ClusteringCost, clustering_cost
from vivace.evaluate.provenance import provenance
from vivace.palette.clustering import MODES, cluster

BITS, ROUNDS = 3, 3
STD = 0.02
"""Standard deviation of the matrix, as in ``vivace bench palette``."""


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
            yield measured(of_coremltools, shape, rows)


def on_ranks(shape: tuple[int, int], rows: int | None, num_ranks: int) -> ClusteringCost:
    """Return the cost of the hooks on several ranks, of the rank where each number is largest."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(_with_group, shape, rows, num_ranks, f"file://{folder}/ranks", count=num_ranks)


def measured(measure: Callable[..., ClusteringCost], *values: Any, count: int | None = None) -> ClusteringCost:
    """Return what a function measures in a new process, or the largest numbers of ``count`` that know their index.

    Raises:
        CapacityError: a process ended before it was done.
    """
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(count or 1)]
    started = [
        context.Process(target=_send, args=(sender, measure, *values, *([] if count is None else [index])))
        for index, (_, sender) in enumerate(ends)
    ]
    for process, (_, sender) in zip(started, ends, strict=True):
        process.start()
        sender.close()
    try:
        found: list[ClusteringCost] = [receiver.recv() for receiver, _ in ends]
    except EOFError as exc:
        raise CapacityError(f"{measure.__name__} {values} ended early: lack of memory, or what it printed") from exc
    finally:
        for process in started:
            process.join()
    first = found[0]
    return ClusteringCost(
        first.mode,
        first.rows,
        max(cost.kept_bytes for cost in found),
        max(cost.peak_bytes for cost in found),
        max(cost.forward_s for cost in found),
        max(cost.backward_s for cost in found),
    )


def of_coremltools(shape: tuple[int, int], rows: int | None) -> ClusteringCost:
    """Measure DKM of coremltools; its first centroids are found before, by a pass that is not measured."""
    from coremltools.optimize.torch.palettization import (  # type: ignore[import-not-found]
        DKMPalettizer,
        DKMPalettizerConfig,
        ModuleDKMPalettizerConfig,
    )

    weight = matrix(shape)
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
    return _cost("coremltools DKM", rows, module.weight, lambda: module.weight_fake_quant(module.weight))


def matrix(shape: tuple[int, int]) -> Tensor:
    """Return the matrix that is clustered, (out, in) bfloat16, with gradients."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * STD
    return drawn.bfloat16().requires_grad_()


def _with_group(shape: tuple[int, int], rows: int | None, ranks: int, meeting: str, rank: int) -> ClusteringCost:
    torch.distributed.init_process_group("gloo", init_method=meeting, world_size=ranks, rank=rank)
    weight, kept = matrix(shape), [0]

    def forward() -> Tensor:
        made = cluster(weight, BITS, rows=rows, rounds=ROUNDS, mode="hooks", group=torch.distributed.group.WORLD)
        assert made.kept_bytes is not None
        kept[0] = made.kept_bytes
        return made.weight

    cost = _cost(f"hooks, {ranks} ranks", rows, weight, forward, is_watched=False)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return ClusteringCost(cost.mode, rows, kept[0], cost.peak_bytes, cost.forward_s, cost.backward_s)


def _cost(
    mode: str, rows: int | None, weight: Tensor, forward: Callable[[], Tensor], *, is_watched: bool = True
) -> ClusteringCost:
    """Run a forward and a backward pass; what autograd keeps is counted unless hooks of their own are at work."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = _forget_peak()
    began = time.perf_counter()
    if is_watched:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = forward()
    else:
        made = forward()
    middle = time.perf_counter()
    made.float().square().sum().backward()  # type: ignore[no-untyped-call]
    ended = time.perf_counter()
    return ClusteringCost(mode, rows, sum(seen.values()), _status("VmHWM") - before, middle - began, ended - middle)


def _forget_peak() -> int:
    """Let the kernel count this process's peak from here (Linux), and return the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def _send(sender: Connection, measure: Callable[..., ClusteringCost], *values: Any) -> None:
    torch.set_num_threads(1)
    sender.send(measure(*values))


if __name__ == "__main__":
    main()

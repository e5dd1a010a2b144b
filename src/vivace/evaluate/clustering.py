"""What clustering a matrix while it is trained costs: bytes kept for the backward pass, process peak and seconds."""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.errors import CapacityError
from vivace.palette import cluster
from vivace.palette.clustering import Mode


@dataclass(frozen=True)
class ClusteringCost:
    """The cost of one forward and backward pass, in a process of its own."""

    mode: str
    rows: int | None
    """Outputs that share a palette; None is one palette for the matrix."""
    kept_bytes: int
    """Kept for the backward pass, every piece of memory once, without the weights themselves."""
    peak_bytes: int
    """By which the process grew at most."""
    forward_s: float
    backward_s: float


def kept_bytes(weight: Tensor, bits: int, rows: int | None, rounds: int, mode: Mode) -> int:
    """Return the bytes that autograd keeps for the backward pass of a clustering."""
    return _forward(weight.detach().requires_grad_(), bits, rows, rounds, mode)[1]


def clustering_cost(
    shape: tuple[int, int], bits: int, rows: int | None, rounds: int, mode: Mode, *, threads: int
) -> ClusteringCost:
    """Cluster a random bfloat16 matrix once in a new process.

    Raises:
        CapacityError: the process ended before it was done, most likely for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, shape, bits, rows, rounds, mode, threads))
    process.start()
    sender.close()
    try:
        found: ClusteringCost = receiver.recv()
    except EOFError as exc:
        process.join()
        raise CapacityError(
            f"clustering {shape[0]} x {shape[1]} in mode {mode} ended early (exit {process.exitcode}), most likely for "
            "lack of memory; give a smaller --shape or other --modes"
        ) from exc
    process.join()
    return found


def _measure(
    sender: object, shape: tuple[int, int], bits: int, rows: int | None, rounds: int, mode: Mode, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * 0.02).bfloat16().requires_grad_()
    _forward((weight[:16, :64]).detach().requires_grad_(), bits, 16, 1, mode)  # what PyTorch sets up once
    before = _most()
    began = time.perf_counter()
    made, kept = _forward(weight, bits, rows, rounds, mode)
    middle = time.perf_counter()
    made.float().square().sum().backward()
    ended = time.perf_counter()
    cost = ClusteringCost(mode, rows, kept, _most() - before, middle - began, ended - middle)
    sender.send(cost)  # type: ignore[attr-defined]


def _forward(weight: Tensor, bits: int, rows: int | None, rounds: int, mode: Mode) -> tuple[Tensor, int]:
    """Return clustered weights, and the bytes that are kept for the way back."""
    if mode == "hooks":
        made = cluster(weight, bits, rows=rows, rounds=rounds, mode=mode)
        assert made.kept_bytes is not None
        return made.weight, made.kept_bytes
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = cluster(weight, bits, rows=rows, rounds=rounds, mode=mode)
    return made.weight, sum(seen.values())


def _most() -> int:
    """Return the most memory that this process had so far, in bytes (Linux counts KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""What clustering a matrix while it is trained costs: bytes kept for the backward pass, process peak and seconds."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from vivace.errors import CapacityError
from vivace.evaluate.memory import peak_memory, resident_memory
from vivace.palette import cluster
from vivace.palette.clustering import Clusters, Mode


@dataclass(frozen=True)
class ClusteringCost:
    """The cost of one forward and backward pass, in a process of its own."""

    mode: str
    rows: int | None
    """Outputs that share a palette; None is one palette for the matrix."""
    kept_bytes: int
    """Kept for the backward pass, every piece of memory once, without the weights themselves."""
    peak_bytes: int
    """By which the process grew at most; 0 where the system does not report it."""
    forward_s: float
    backward_s: float


def kept_bytes(weight: Tensor, bits: int, rows: int | None, rounds: int, mode: Mode) -> int:
    """Return the bytes that autograd keeps for the backward pass of a clustering."""
    leaf = weight.detach().requires_grad_()
    return _forward(leaf, lambda: cluster(leaf, bits, rows=rows, rounds=rounds, mode=mode))[1]


def clustering_cost(
    shape: tuple[int, int], bits: int, rows: int | None, rounds: int, mode: Mode, *, threads: int
) -> ClusteringCost:
    """Cluster a random bfloat16 matrix once in a new process.

    Raises:
        CapacityError: the process ended before it was done, most likely for lack of memory.
    """
    what = f"clustering {shape[0]} x {shape[1]} in mode {mode}"
    advice = "give a smaller --shape or other --modes"
    return in_processes(what, _measure, shape, bits, rows, rounds, mode, threads=threads, advice=advice)[0]


def in_processes(
    what: str,
    measure: Callable[..., ClusteringCost],
    *values: Any,
    threads: int,
    count: int | None = None,
    advice: str = "give a smaller --shape",
) -> list[ClusteringCost]:
    """Return what a function measures in a new process, or in ``count`` at once.

    Args:
        what: what is measured, for messages.
        measure: a function of a module; with a ``count`` it takes its index behind the values.
        values: its arguments.
        threads: threads of each process.
        count: number of processes; None is one, without an index.
        advice: what to do where memory is short.

    Raises:
        CapacityError: a process ended before it was done, most likely for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    started = []
    for index in range(count or 1):
        receiver, sender = context.Pipe(duplex=False)
        given = values if count is None else (*values, index)
        process = context.Process(target=_send, args=(sender, threads, measure, *given))
        process.start()
        sender.close()
        started.append((process, receiver))
    found: list[ClusteringCost] = []
    for process, receiver in started:
        try:
            found.append(receiver.recv())
        except EOFError as exc:
            process.join()
            raise CapacityError(
                f"{what} ended early (exit {process.exitcode}), most likely for lack of memory; {advice}"
            ) from exc
    for process, _ in started:
        process.join()
    return found


def random_matrix(shape: tuple[int, int]) -> Tensor:
    """Return the matrix that is clustered, (out, in) bfloat16, with gradients."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16().requires_grad_()


def pass_cost(mode: str, rows: int | None, weight: Tensor, forward: Callable[[], Clusters | Tensor]) -> ClusteringCost:
    """Run a forward and a backward pass, and return what they cost.

    Args:
        mode: name of what is measured.
        rows: outputs that share a palette; None is one palette for the matrix.
        weight: (out, in), what is clustered, with gradients.
        forward: returns the clustered weights, with the bytes that are kept where it counts them itself.
    """
    before = resident_memory() or 0
    with peak_memory(torch.device("cpu")) as peak:
        began = time.perf_counter()
        made, kept = _forward(weight, forward)
        middle = time.perf_counter()
        made.float().square().sum().backward()
        ended = time.perf_counter()
    grown = 0 if peak.num_bytes is None else peak.num_bytes - before
    return ClusteringCost(mode, rows, kept, grown, middle - began, ended - middle)


def _measure(shape: tuple[int, int], bits: int, rows: int | None, rounds: int, mode: Mode) -> ClusteringCost:
    weight = random_matrix(shape)
    kept_bytes(weight[:16, :64], bits, 16, 1, mode)  # what PyTorch sets up once
    return pass_cost(mode, rows, weight, lambda: cluster(weight, bits, rows=rows, rounds=rounds, mode=mode))


def _send(sender: Connection, threads: int, measure: Callable[..., ClusteringCost], *values: Any) -> None:
    torch.set_num_threads(threads)
    sender.send(measure(*values))


def _forward(weight: Tensor, forward: Callable[[], Clusters | Tensor]) -> tuple[Tensor, int]:
    """Return clustered weights, and the bytes that are kept for the way back; hooks count theirs themselves."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = forward()
    if isinstance(made, Tensor):
        return made, sum(seen.values())
    return made.weight, sum(seen.values()) if made.kept_bytes is None else made.kept_bytes

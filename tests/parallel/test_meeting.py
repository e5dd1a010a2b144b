"""Sums among threads have the bits of sums over links, and end where one of them cannot come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_checkpoints import make_checkpoint
from vivace.core.summed import Collective
from vivace.errors import WorldError
from vivace.parallel.collective import WIRES, LinkedSum, Wire
from vivace.parallel.meeting import Meeting, MetSum
from vivace.parallel.simulated import simulated_worlds
from vivace.parallel.world import World

ROOT = Path(__file__).resolve().parents[2]


def summed(count: int, make: Callable[[World], Collective], rows: list[Tensor]) -> list[list[Tensor]]:
    """What every rank gets for two sums, the second of which lies at another point."""
    worlds = simulated_worlds(count)

    def work(world: World) -> list[Tensor]:
        collective, x = make(world), rows[world.rank]
        first = collective.all_reduce(x, point=(0, "o"))
        kept = first.clone()
        first += 1  # as a rank may that adds its residual
        return [kept, collective.all_reduce(x * 2, point=(0, "q_norm"))]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(work, worlds))
    for world in worlds:
        world.links.close()
    return found


@pytest.mark.parametrize("name", list(WIRES))
@pytest.mark.parametrize(("count", "num_rows"), [(2, 3), (4, 2), (4, 64), (3, 65)])
def test_bits_are_those_of_links(name: str, count: int, num_rows: int) -> None:
    wire: Wire = WIRES[name]
    drawn = torch.Generator().manual_seed(count)
    rows = [torch.randn(num_rows, 256, generator=drawn) for _ in range(count)]
    linked = summed(count, lambda world: LinkedSum(world, wire), rows)
    meeting = Meeting(count)
    met = summed(count, lambda world: MetSum(world, meeting, wire), rows)
    for rank in range(count):
        for one, other in zip(met[rank], linked[0], strict=True):
            assert torch.equal(one, other)


def test_who_comes_twice_is_told_that_the_ranks_are_out_of_step() -> None:
    meeting, has_ended = Meeting(2), threading.Event()

    def look() -> None:
        has_ended.set()
        raise WorldError("rank 1 has ended")

    with pytest.raises(WorldError, match="rank 1 has ended"):
        meeting.meet(0, 1, list, look)
    assert has_ended.is_set()
    with pytest.raises(WorldError, match="out of step"):
        meeting.meet(0, 2, list, look)


def test_an_error_of_one_rank_ends_the_others() -> None:
    worlds, meeting = simulated_worlds(2), Meeting(2)

    class Broken:
        most_in_one_shot = 2

        def encode(self, *_: Any) -> Any:
            raise ValueError("no codes")

    def fails(world: World) -> None:
        try:
            MetSum(world, meeting, Broken()).all_reduce(torch.ones(1, 4), point=(0, "o"))  # type: ignore[arg-type]
        except ValueError as error:
            with pytest.raises(WorldError):
                world.links.fail(f"rank {world.rank}: {error}")

    thread = threading.Thread(target=fails, args=(worlds[1],))
    thread.start()
    with pytest.raises(WorldError, match="rank 1: no codes"):
        MetSum(worlds[0], meeting).all_reduce(torch.ones(1, 4), point=(0, "o"))
    thread.join()


def test_python_ends_well_behind_ranks_in_one_process(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    script = f"""
import vivace
from vivace.parallel.simulated import SimulatedLoading
engine = vivace.load({str(tmp_path)!r}, kernels="torch", parallel=SimulatedLoading(4))
engine.logits([list(range(5, 45))])
engine.world.close()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")

"""Forms in which sums travel: every rank gets the same bits, and those that one process computes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
import vivace.parallel.world as worlds
from tests.parallel.ranks import run_ranks
from tests.tiny_checkpoints import make_checkpoint
from vivace.errors import ConfigError
from vivace.parallel.collective import (
    WIRES,
    LinkedSum,
    find_wire,
    summed_as_sent,
    summed_in_two_shots,
)

POINT = (0, "down")
KINDS = (torch.float32, torch.bfloat16)


def rows_of(rank: int, count: int, kind: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of them all zero."""
    numbers = torch.Generator().manual_seed(rank)
    rows = torch.randn(count, 48, generator=numbers) * torch.logspace(-3, 3, count)[:, None]
    rows[count // 2] = 0
    return rows.to(kind)


@pytest.mark.multiprocess
@pytest.mark.parametrize("wire", sorted(WIRES))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_get_what_one_process_computes(wire: str, count: int) -> None:
    def work() -> Any:
        world = worlds.join(timeout_s=20)
        linked = LinkedSum(world, find_wire(wire))
        found = [
            linked.all_reduce(rows_of(world.rank, size, kind), point=(0, site))
            for kind in KINDS
            for size in (1, 5, 700)
            for site in ("down", "q_norm")
        ]
        return found

    answers = run_ranks(count, work)
    for other in answers[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, answers[0], strict=True))
    place = 0
    for kind in KINDS:
        for size in (1, 5, 700):
            parts = [rows_of(rank, size, kind) for rank in range(count)]
            once = summed_as_sent(parts, WIRES[wire], POINT)
            if count == 2 or size < 700 or wire == "same":  # a lossy wire rounds sums in two shots a second time
                assert torch.equal(answers[0][place], once)
            else:
                assert torch.equal(answers[0][place], summed_in_two_shots(parts, WIRES[wire], POINT))
                torch.testing.assert_close(answers[0][place], once, rtol=0.05, atol=float(once.abs().max()) * 0.02)
            assert torch.equal(answers[0][place + 1], summed_as_sent(parts, WIRES["same"], POINT))
            place += 2


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_within_half_a_step_and_stay_what_they_are(kind: torch.dtype) -> None:
    wire, rows = WIRES["int8"], rows_of(0, 40, kind)
    codes, scale = wire.encode(rows, POINT, 0)
    decoded = wire.decode((codes, scale), POINT)
    assert codes.nbytes + scale.nbytes == 40 * (48 + 4)
    assert bool(((decoded - rows.float()).abs() <= scale / 2 * 1.001).all())
    assert torch.equal(wire.decode(wire.encode(decoded, POINT, 0), POINT), decoded)
    assert not decoded[20].any()


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire is 'int9'; did you mean 'int8'"):
        find_wire("int9")


@pytest.mark.multiprocess
def test_fewer_bytes_travel_and_the_answer_is_near(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    ids = [list(range(5, 45))]
    alone = vivace.load(tmp_path, kernels="torch").logits(ids)

    def work(wire: str) -> Any:
        engine = vivace.load(tmp_path, kernels="torch", parallel="tensor", wire=wire, timeout=20)
        return engine.logits(ids), engine.world.traffic["1"]["down"]["bytes"], engine.model.config

    (logits, sent, config), _ = run_ranks(2, work, "int8")
    assert sent == config.num_layers * 40 * (config.width + 4)
    spread = float(alone.std())
    assert 0 < float((logits - alone).abs().max()) < 0.3 * spread

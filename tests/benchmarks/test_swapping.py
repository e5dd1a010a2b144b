"""LoRAs are swapped while clients wait for answers with them: none is wrong, and memory stays within its limit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.swapping import measure
from tests.tiny_checkpoints import make_checkpoint


def test_answers_stay_right_while_adapters_come_and_go(tmp_path: Path) -> None:
    found = measure(make_checkpoint(tmp_path / "tiny"), clients=6, adapters=8, room=2, seconds=1.5, rank=4)
    for load in (found["without_swaps"], found["with_swaps"]):
        assert load["answers"] > 6
        assert load["wrong"] == load["failed"] == 0
        assert 0 < load["most_adapter_bytes"] <= found["budget_bytes"]
    assert found["swaps"] > 4
    assert found["swap_p50_ms"] > 0

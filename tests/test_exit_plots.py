"""Pictures of early exits: same report, same bytes."""

from __future__ import annotations

from pathlib import Path

from benchmarks import exit_plots


def test_pictures_of_a_report_are_the_same_each_time(tmp_path: Path) -> None:
    curve = {"depths": [1, 2], "cosine": [0.1, 1.0], "step": [0.5, 0.4], "agreement": [0.2, 1.0]}
    tradeoffs = [{"mean_layers": 2.0 - q, "agreement": 1.0 - q / 10} for q in (0.1, 0.5)]
    report = {
        "num_layers": 2,
        "velocity": {"slow": curve, "accelerated": [curve]},
        "routers": [{"kind": "arla", "tradeoffs": tradeoffs}, {"kind": "gap", "tradeoffs": tradeoffs}],
        "decoding": [
            {"method": "plain", "mean_exit_layer": None, "speedup": 1.0},
            {"method": "dynamic@0.9", "mean_exit_layer": 1.5, "speedup": 1.2},
        ],
    }
    first = [path.read_bytes() for path in exit_plots.draw(report, tmp_path / "a")]
    assert [path.read_bytes() for path in exit_plots.draw(report, tmp_path / "b")] == first
    velocity, tradeoff = (picture.decode() for picture in first)
    assert all(word in velocity for word in ("slow", "accelerated", "says the last token"))
    assert all(word in tradeoff for word in ("arla", "gap", "dynamic@0.9"))

"""Two pictures of early exits: how fast residuals turn, and what speed costs in agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plots import COLOURS

VELOCITY, TRADEOFF = "velocity.svg", "exits.svg"
CURVES = (("cosine", "cosine to the last residual"), ("step", "step / residual"), ("agreement", "says the last token"))


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw both pictures of a report of ``benchmarks.exits``.

    Args:
        report: What it measured.
        folder: Where the pictures go.

    Returns:
        The files written; the same report gives the same bytes.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="vivace", fonttype="none")
        matplotlib.rc("font", family="sans-serif", size=10)
        return [_velocity(report["velocity"], folder / VELOCITY), _tradeoff(report, folder / TRADEOFF)]


def _axes(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * count, 3.2), layout="constrained")
    axes = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _velocity(streams: dict[str, Any], path: Path) -> Path:
    figure, axes = _axes(len(CURVES))
    for axis, (key, label) in zip(axes, CURVES, strict=True):
        axis.plot(streams["slow"]["depths"], streams["slow"][key], color="#6e7781", label="slow")
        for place, fast in enumerate(streams["accelerated"]):
            name = "accelerated, interval by interval" if place == 0 else None
            axis.plot(fast["depths"], fast[key], marker=".", color=COLOURS[0], label=name)
        axis.set(xlabel="layer", ylabel=label)
    axes[0].legend(frameon=False)
    return _save(figure, path)


def _tradeoff(report: dict[str, Any], path: Path) -> Path:
    figure, axes = _axes(2)
    for row, colour in zip(report["routers"], COLOURS, strict=False):
        points = [(t["mean_layers"], t["agreement"]) for t in row["tradeoffs"]]
        axes[0].plot(*zip(*points, strict=True), marker="o", color=colour, label=row["kind"])
    axes[0].set(xlabel="layers a token", ylabel="agreement with the whole model")
    axes[0].legend(frameon=False)
    for run in report["decoding"]:
        axes[1].plot(run["mean_exit_layer"] or report["num_layers"], run["speedup"], marker="o", color=COLOURS[0])
        axes[1].annotate(run["method"], (run["mean_exit_layer"] or report["num_layers"], run["speedup"]))
    axes[1].set(xlabel="layers a token", ylabel="speed beside plain")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path

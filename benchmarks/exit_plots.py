"""Plots of early exits: how fast residuals converge, agreement against speed, and quality against cost of all
methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.plots import COLOURS

VELOCITY, TRADEOFF = "velocity.svg", "exits.svg"
MARKERS = "os^Dv"
CURVES = (("cosine", "cosine to the last residual"), ("step", "step / residual"), ("agreement", "says the last token"))


@contextmanager
def _plain_settings() -> Iterator[None]:
    """Reset matplotlib's settings, so that the same report gives the same bytes whatever the user has set."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="vivace", fonttype="none")
        matplotlib.rc("font", family="sans-serif", size=10)
        yield


def draw_tradeoff(report: dict[str, Any], path: Path) -> Path:
    """Plot every way to decode of a report of ``benchmarks.tradeoff``: quality against bytes read, and against speed.

    Points that differ only in the agreement target are joined; lossless methods are rings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _plain_settings():
        figure, axes = _axes(2)
        curves: dict[str, list[dict[str, Any]]] = {}
        for one in report["points"]:
            name, _, rest = one["method"].partition("@")
            curves.setdefault(name + rest.partition(" ")[1] + rest.partition(" ")[2], []).append(one)
        for place, (name, points) in enumerate(curves.items()):
            colour, hollow = COLOURS[place % len(COLOURS)], points[0]["lossless"]
            marker = MARKERS[place // len(COLOURS) % len(MARKERS)]
            for axis, key in zip(axes, ("read_share", "speedup"), strict=True):
                xs, ys = [one[key] for one in points], [one["quality"] for one in points]
                face = "none" if hollow else colour
                axis.plot(xs, ys, marker=marker, markerfacecolor=face, color=colour, linewidth=1, label=name)
        axes[0].set(xlabel="weight bytes read for a token, beside plain", ylabel=f"quality, {report['prompts']}")
        axes[1].set(xlabel="speed beside plain")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
        return _save(figure, path)


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw both plots of a report of ``benchmarks.exits``.

    Args:
        report: the measurements.
        folder: folder for the plots.

    Returns:
        The files written; the same report gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _plain_settings():
        return [_velocity(report["velocity"], folder / VELOCITY), _tradeoff(report, folder / TRADEOFF)]


def _axes(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * count, 3.2), layout="constrained")
    axes = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _velocity(streams: dict[str, Any], path: Path) -> Path:
    """Plot how residuals change over the layers."""
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
    """Plot agreement and speed against layers per token."""
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
    """Write a figure as SVG without a date."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path

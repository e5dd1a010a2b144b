"""Two plots of results: acceptance by position in the draft, and the parts of the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ACCEPTANCE, TIME = "acceptance.svg", "time.svg"
PARTS = (("prefill_s", "prefill", "#8c959f"), ("draft_s", "draft", "#d4a72c"), ("verify_s", "verify", "#0969da"))
COLOURS = ("#0969da", "#d4a72c", "#1a7f37", "#cf222e", "#8250df", "#6e7781")

Panel = tuple[str, Sequence[dict[str, Any]]]
"""Title and runs of one panel."""


def draw(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw both plots, with one panel for each result.

    Args:
        panels: title and runs of each result.
        folder: folder for the plots.

    Returns:
        The files written; the same panels give the same bytes.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="vivace", fonttype="none")
        matplotlib.rc("font", family="sans-serif", size=10)
        return [_acceptance(panels, folder / ACCEPTANCE), _time(panels, folder / TIME)]


def _figure(num_panels: int, height: float) -> tuple[Any, list[Any]]:
    """Return a figure with axes in at most two columns."""
    from matplotlib.figure import Figure

    columns = min(2, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(5 * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(num_panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _acceptance(panels: Sequence[Panel], path: Path) -> Path:
    """Plot the share of drafted tokens that were accepted, by position."""
    figure, axes = _figure(len(panels), 3.2)
    methods = [run["method"] for _, runs in panels for run in runs if run["acceptance_per_position"]]
    colours = dict(zip(dict.fromkeys(methods), COLOURS, strict=False))
    for axis, (title, runs) in zip(axes, panels, strict=True):
        drafting = [run for run in runs if run["acceptance_per_position"]]
        for run in drafting:
            shares, colour = run["acceptance_per_position"], colours.get(run["method"], "black")
            axis.plot(range(1, len(shares) + 1), shares, marker="o", color=colour, label=run["method"])
        deepest = max((len(run["acceptance_per_position"]) for run in drafting), default=1)
        axis.set(title=title, xlabel="position in the draft", ylabel="share kept")
        axis.set(ylim=(0, 1), xticks=range(1, deepest + 1))
        if drafting:
            axis.legend(frameon=False)
    return _save(figure, path)


def _time(panels: Sequence[Panel], path: Path) -> Path:
    """Plot milliseconds per new token for reading the prompt, drafting and verifying."""
    figure, axes = _figure(len(panels), 2.6)
    for axis, (title, runs) in zip(axes, panels, strict=True):
        timed = [run for run in runs if run["verify_s"] is not None][::-1]
        names = [run["method"] for run in timed]
        start = [0.0] * len(timed)
        for key, label, colour in PARTS:
            widths = [1e3 * (run[key] or 0.0) / max(1, run["num_tokens"]) for run in timed]
            axis.barh(names, widths, left=start, color=colour, label=label, height=0.6)
            start = [before + width for before, width in zip(start, widths, strict=True)]
        axis.set(title=title, xlabel="milliseconds per new token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS), frameon=False)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    """Write a figure as SVG without a date."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path

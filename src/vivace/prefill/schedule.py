"""How many tokens of a prompt go on, and behind which layers the others are pruned.

Presets (Fu et al. 2024, arXiv:2407.14057): the paper's overview prunes 30 % of the tokens behind 30, 60 and 87.5 % of
the layers, and does not say which shares its tables were made with; ``balanced`` and ``fast`` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from vivace.errors import ConfigError, nearest

DEPTHS = (0.30, 0.60, 0.875)
"""Shares of the layers behind which presets prune."""
PRESETS: Mapping[str, tuple[float, ...]] = {
    "paper": (0.7, 0.7, 0.7),
    "balanced": (0.5, 0.5, 0.5),
    "fast": (0.3, 0.5, 0.5),
}
"""By name, the share of tokens that go on behind each of these depths."""
SCORES = ("paper", "heads", "taught")
"""What may say which tokens go on: what the last one reads, what the last ones read in a few heads, and maps that were
taught (``learned.py``)."""
SAME = "same"
"""As ``decode_keep``: the shares with which the prompt was pruned."""


@dataclass(frozen=True)
class PrunePoint:
    """A layer behind which tokens are pruned."""

    layer: int
    """Number of layers that all tokens have passed there; 0 prunes before the first."""
    keep: float
    """Share of the tokens that go on."""
    score: str = "paper"
    """What says which ones (``SCORES``)."""
    entries: float | None = None
    """Share of the prompt whose keys and values each head keeps in every layer; None keeps those of all tokens that
    passed it."""


@dataclass(frozen=True)
class Schedule:
    """Where a prompt is pruned, from the bottom up."""

    points: tuple[PrunePoint, ...]
    reads_again: bool = False
    """Whether the tokens that go on behind the only point pass all layers, from the first one."""

    def counts(self, length: int) -> tuple[int, ...]:
        """Return the tokens of a prompt that pass the layers up to the first point, behind it, and so on.

        The last token of the prompt is among them everywhere.
        """
        counts = [length]
        for point in self.points:
            counts.append(max(1, ceil(point.keep * counts[-1] - 1e-9)))
        return tuple(counts)

    def spans(self, num_layers: int) -> list[tuple[int, int]]:
        """Return the first layer of each part and the one past its last."""
        edges = [0, *(point.layer for point in self.points), num_layers]
        spans = list(pairwise(edges))
        return [*spans[:-1], (0, num_layers)] if self.reads_again else spans

    def share(self, length: int, num_layers: int) -> float:
        """Return the share of a full reading's layer passes that a prompt takes, its last token not counted."""
        spans = zip(self.counts(length), self.spans(num_layers), strict=True)
        return sum((count - 1) * (stop - start) for count, (start, stop) in spans) / ((length - 1) * num_layers)


def parse_decode_keep(text: str | float, schedule: Schedule) -> tuple[float, ...] | None:
    """Read which share of the tokens goes on behind each point while the answer is written.

    Args:
        text: "same" for the shares of the prompt, or one share for all points; 1 prunes nothing more.
        schedule: of the prompt.

    Returns:
        The shares, or None for 1: what the prompt has kept stays, and nothing comes back.

    Raises:
        ConfigError: it is neither.
    """
    if text == SAME:
        return tuple(point.keep for point in schedule.points)
    try:
        share = float(text)
    except ValueError:
        raise ConfigError(
            f"decode_keep is {text!r}; give {SAME!r}, or a share such as 0.5", field="decode_keep"
        ) from None
    if not 0 < share <= 1:
        raise ConfigError(f"decode_keep is {text}; it must be in (0, 1], or {SAME!r}", field="decode_keep")
    return None if share == 1 else (share,) * len(schedule.points)


def scaled(preset: str, num_layers: int) -> Schedule:
    """Return a preset for a model of so many layers."""
    points: dict[int, PrunePoint] = {}
    for depth, keep in zip(DEPTHS, PRESETS[preset], strict=True):
        layer = min(max(1, round(depth * num_layers)), num_layers - 1)
        points.setdefault(layer, PrunePoint(layer, keep))
    return Schedule(tuple(points.values()))


def parse_keep(
    text: str, num_layers: int, *, first: int = 1, most: int | None = None, has_entries: bool = False
) -> Schedule:
    """Read a schedule: the name of a preset, or "9:0.5,18:0.5", layers and the shares that go on behind them.

    A layer may be a share of the depth, as in "30%:0.5". A share may be followed by a score, as in "6:0.3:taught", or,
    in ways of reading that select entries, by the share of those, as in "15:0.2:0.1".

    Args:
        text: what was written.
        num_layers: of the model.
        first: smallest layer that may be named.
        most: how many layers may be named; None for any number.
        has_entries: whether a second share is of entries.

    Raises:
        ConfigError: it is neither, or a layer or share cannot be.
    """
    if text in PRESETS and most is None:
        return scaled(text, num_layers)
    points: list[PrunePoint] = []
    for word in text.split(","):
        point = _point(word.strip(), num_layers, takes_preset=most is None, has_entries=has_entries)
        layer = point.layer
        if not first <= point.layer < num_layers:
            last = num_layers - 1
            where = f"this model can prune behind {first} to {last}"
            if first == last:
                where = f"this way of reading prunes behind layer {first} only, as in {first}:0.5"
            raise ConfigError(f"keep has layer {layer}; {where}", field="keep")
        if points and point.layer <= points[-1].layer:
            raise ConfigError(
                f"keep has layer {layer} behind layer {points[-1].layer}; write them in rising order", field="keep"
            )
        points.append(point)
    if most is not None and len(points) > most:
        raise ConfigError(f"keep names {len(points)} layers; this way of reading prunes once, behind one", field="keep")
    return Schedule(tuple(points))


def _point(word: str, num_layers: int, *, takes_preset: bool, has_entries: bool) -> PrunePoint:
    """Read one point of a schedule.

    Raises:
        ConfigError: it is none, or a share cannot be.
    """
    layer, colon, rest = word.partition(":")
    keep, more, last = rest.partition(":")
    try:
        place = _layer(layer, num_layers)
        if has_entries:
            point = PrunePoint(place, float(keep), entries=float(last) if more else None)
        else:
            point = PrunePoint(place, float(keep), last if more else SCORES[0])
    except (ValueError, OverflowError):
        hint = nearest(word, PRESETS) if not colon and takes_preset else ""
        form = "LAYER:SHARE or LAYER:SHARE:ENTRIES, such as 15:0.2:0.1" if has_entries else "LAYER:SHARE, such as 9:0.5"
        raise ConfigError(f"keep has {word!r}; write {form}{hint}", field="keep") from None
    if point.score not in SCORES or (more and not has_entries and not takes_preset):
        known = nearest(last, SCORES) if takes_preset else "; this way of reading has one score, leave it out"
        raise ConfigError(f"keep has the score {last!r} behind layer {layer}{known}", field="keep")
    for share, written in ((point.keep, keep), (point.entries, last)):
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"keep has the share {written} behind layer {layer}; it must be in (0, 1]", field="keep")
    return point


def _layer(text: str, num_layers: int) -> int:
    """Return a layer that is given by its number, or as a share of the depth such as 40%."""
    if not text.endswith("%"):
        return int(text)
    return min(max(1, round(float(text[:-1]) / 100 * num_layers)), num_layers - 1)

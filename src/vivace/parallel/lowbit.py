"""Sums in about four bits a number, with ranges that were calibrated (Dong et al. 2024, arXiv:2411.07942).

A few features have large ranges, the same ones for every text and on every rank. They travel in bfloat16; all others as
codes of four bits, with a step for each rank, feature and place in the model. Nothing but payloads is sent. Every rank
adds what the payloads stand for, its own included, so that all of them hold the same.

The paper's form, named "paper", takes the largest number that calibration saw (an average over texts) as seven steps.
**Ours**, named "lowbit", differs twice. Steps are those of the least squared error over what calibration saw, so that
rare large numbers are clipped. And each row of a rank sends one byte by which all its steps are multiplied, since rows
differ in size far more than the features of one row do. "int4" keeps no feature, "random" keeps as many as the paper,
drawn at random: the paper's own comparisons.

And **errors are fed back**: what the codes of a rank have left out of a row at one sum is added to its part of that row
at the next sum. The residual stream adds up all sums, so that it lacks the errors of the last sum alone:

    y_p = x_p + e_(p-1)      e_p = y_p - Q(y_p)      sum over p of Q(y_p) = (sum over p of x_p) - e_P

as a sigma-delta modulator does in time. It needs a residual stream to which sums are added as they are, not through a
norm behind them. "open" is ours without it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.adapters import load_adapter
from vivace.core.summed import Point
from vivace.errors import CorruptError, MismatchError, NotFoundError
from vivace.kernels.wire import LEAST_STEP, WireCode

KIND = "lowbit"
FORMS = ("lowbit", "open", "int4", "paper", "random")
"""Forms whose steps are calibrated."""
SITES = ("o", "down")
"""Where a layer's products are added."""
KEEP = 1 / 64
"""Share of the features that travel in bfloat16."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was seen at every sum of a model, (2 L) of them: two for each layer, in the order of ``SITES``.

    Tensors are (2 L, R + 1, E) float32: of the ranks' parts, and behind them of their sum.
    """

    num_ranks: int
    dtype: str
    """Of the model that was calibrated."""
    low: Tensor
    """Smallest number of each feature, an exponential moving average over texts."""
    high: Tensor
    """Largest number, likewise."""
    step: Tensor
    """Steps of the least squared error, in units of a row's mean absolute number."""

    @staticmethod
    def read(folder: str | Path, base: str, columns: Sequence[int], dtype: str) -> Calibration:
        """Read a calibration folder.

        Args:
            folder: written by ``vivace train lowbit``.
            base: hash of the checkpoint that it is to fit.
            columns: how many feed-forward columns each rank computes.
            dtype: of the model that it is to fit.

        Raises:
            NotFoundError: there is none.
            MismatchError: it is of another checkpoint, other ranks or another dtype, or no calibration.
            CorruptError: a tensor is missing, of another shape, or not finite.
        """
        place, num_ranks = Path(folder), len(columns)
        if not place.is_dir():
            raise NotFoundError(
                f"there is no calibration {place}; make one: vivace train lowbit ranks={num_ranks} --model MODEL "
                "--data FILE"
            )
        written, tensors = load_adapter(place, base)
        if written["kind"] != KIND:
            raise MismatchError(f"{place} is an adapter for {written['kind']!r}, not a calibration ({KIND})")
        config: Mapping[str, Any] = written["config"]
        for name, value, found in (
            ("ranks", num_ranks, config.get("num_ranks")),
            ("dtype", dtype, config.get("dtype")),
            ("feed-forward columns by rank", list(columns), config.get("columns", "that were not noted")),
        ):
            if value != found:
                raise MismatchError(
                    f"the calibration {place} is for {name} {found}, this is {name} {value}; calibrate again: vivace "
                    f"train lowbit ranks={num_ranks}"
                )
        parts = [tensors[name] for name in ("low", "high", "step") if name in tensors]
        shapes = {part.shape for part in parts}
        is_whole = len(parts) == 3 and len(shapes) == 1 and parts[0].dim() == 3 and parts[0].shape[1] == num_ranks + 1
        if not is_whole or not all(bool(part.isfinite().all()) for part in parts):
            raise CorruptError(
                f"{place} holds no calibration of {num_ranks} ranks, or one that is damaged; calibrate again: vivace "
                f"train lowbit ranks={num_ranks}"
            )
        return Calibration(num_ranks, dtype, *parts)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored."""
        return {"low": self.low, "high": self.high, "step": self.step}

    @property
    def width(self) -> int:
        """Number of features."""
        return self.low.shape[2]

    def code(self, point: Point, form: str, keep: float = KEEP) -> WireCode:
        """Return how rows of a sum travel.

        Args:
            point: the sum.
            form: one of ``FORMS``.
            keep: share of the features that travel in bfloat16; 1 is all of them.
        """
        place = 2 * point[0] + SITES.index(point[1])
        low, high = self.low[place], self.high[place]
        num_kept = 0 if form == "int4" else num_features(self.width, keep)
        if form == "random":
            kept = torch.randperm(self.width, generator=torch.Generator().manual_seed(place))[:num_kept]
        else:
            kept = kept_features(high[:-1] - low[:-1], num_kept)
        is_kept = torch.zeros(self.width, dtype=torch.bool)
        is_kept[kept] = True
        rest = (~is_kept).nonzero().squeeze(1)
        is_ours = form in ("lowbit", "open")
        steps = self.step[place] if is_ours else torch.maximum(low.abs(), high.abs()) / 7
        return WireCode(is_kept.nonzero().squeeze(1), rest, steps[:, rest].clamp(min=LEAST_STEP).contiguous(), is_ours)


def num_features(width: int, share: float) -> int:
    """Return how many of ``width`` features travel in bfloat16, so that an even number is left."""
    count = int(width * share)
    return count if count == width else count + (width - count) % 2


def kept_features(ranges: Tensor, count: int) -> Tensor:
    """Return the features (count,) whose ranges (R, E), added over ranks, are the largest; of equals the first."""
    return ranges.sum(0).argsort(descending=True, stable=True)[:count]


class FedBack:
    """What codes have left out of the rows of the pass that is under way, by who sends them."""

    def __init__(self) -> None:
        """Begin without errors."""
        self._left: dict[tuple[int | None, int], Tensor] = {}
        self._last = -1
        """Place of the sum that was met last, in the order of layers."""
        self._calls: Counter[int | None] = Counter()
        """How often each source has sent rows of that sum: in two shots it sends them in slices."""

    def meet(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, tuple[int | None, int]]:
        """Return rows (T, E) in float32 with what was left out of them, and the name under which to store the rest.

        A sum that lies before the last one begins another pass, and other rows. Where a pass goes on with fewer of its
        rows, as behind the last token of a prompt, nothing is added.
        """
        place = 2 * point[0] + SITES.index(point[1])
        if place != self._last:
            if place < self._last:
                self._left.clear()
            self._last = place
            self._calls.clear()
        name = source, self._calls[source]
        self._calls[source] += 1
        before = self._left.get(name)
        return (x.float() if before is None or before.shape != x.shape else x.float() + before), name

    def store(self, left: Tensor, name: tuple[int | None, int]) -> None:
        """Store what codes have left out of rows (T, E)."""
        self._left[name] = left


class LowBitWire:
    """Implements ``Wire``: rows travel in the form that a calibration describes."""

    most_in_one_shot = 4
    """With more ranks, and for many rows, sums take two shots, which send less and round twice."""

    def __init__(self, calibration: Calibration, form: str, keep: float = KEEP, *, feeds_back: bool = True) -> None:
        """Send rows in one of ``FORMS``.

        Args:
            calibration: of the model.
            form: of the rows.
            keep: share of the features that travel in bfloat16.
            feeds_back: whether form "lowbit" adds errors to the next sum, which must then be of the same stream.
        """
        self._fed_back = FedBack() if form == "lowbit" and feeds_back else None
        self._calibration = calibration
        self._form = form
        self._keep = keep
        self._codes: dict[Point, WireCode] = {}
        self.numbers: Counter[Point] = Counter()
        """How many numbers were coded, by the sum."""
        self.clipped: Counter[Point] = Counter()
        """How many of them lay outside of what codes reach."""

    def code(self, point: Point) -> WireCode:
        """Return how rows of a sum travel."""
        if point not in self._codes:
            self._codes[point] = self._calibration.code(point, self._form, self._keep)
        return self._codes[point]

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Return the payload of rows."""
        code, steps = self.code(point), self._calibration.num_ranks if source is None else source
        if self._fed_back is None:
            payload, clipped = code.encode(x, steps)
        else:
            whole, name = self._fed_back.meet(x, point, source)
            payload, clipped = code.encode(whole, steps)
            self._fed_back.store(whole - code.add([payload], steps), name)
        self.numbers[point] += len(x) * len(code.rest)
        self.clipped[point] += clipped
        return (payload,)

    def added(self, parts: Sequence[Sequence[Tensor]], point: Point, dtype: torch.dtype) -> Tensor:
        """Return the sum of what all ranks have sent."""
        return self.code(point).add([payload for (payload,) in parts]).to(dtype)

    def decode(self, parts: Sequence[Tensor], point: Point) -> Tensor:
        """Return the sums that another rank has computed."""
        return self.code(point).add(list(parts), self._calibration.num_ranks)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the calibration, by which ranks compare theirs."""
        digest = hashlib.sha256(self._form.encode())
        for part in self._calibration.tensors().values():
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def saturation(self) -> float:
        """Share of coded numbers that were clipped."""
        return self.clipped.total() / max(1, self.numbers.total())

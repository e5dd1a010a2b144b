"""What steps have in common whose costs may be compared: the number of sequences, drawing, and the length of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.core.seams import Context

NEAR = 2
"""Numbers of sequences within this factor share measurements."""
SHORT = 256
"""Texts below this many tokens are of one class, those below four times as many of the next, and so on."""


@dataclass(frozen=True)
class Regime:
    """A class of steps."""

    batch: int
    """Number of sequences."""
    is_drawn: bool = False
    """Whether tokens of some sequence are drawn, or processed before they are chosen."""
    length: int = 0
    """Class of the mean length of the texts (``length_class``)."""
    is_padded: bool = False
    """Whether passes are padded to a number of rows (``exact``), which takes longer and other steps."""

    @property
    def label(self) -> str:
        """Return a short description for users."""
        texts = "" if self.length < 2 else f", texts of {SHORT << 2 * (self.length - 1)} tokens and more"
        return f"batch {self.batch}{', drawn' if self.is_drawn else ''}{', exact' if self.is_padded else ''}{texts}"

    @property
    def key(self) -> str:
        """Return the regime as a file names it."""
        padded = " padded" if self.is_padded else ""
        return f"{self.batch} {'drawn' if self.is_drawn else 'greedy'} {self.length}{padded}"

    @staticmethod
    def of_key(key: str) -> Regime:
        """Return the regime that a file names.

        Raises:
            ValueError: it names none.
        """
        batch, kind, length, *rest = key.split(" ")
        if kind not in ("drawn", "greedy") or int(batch) < 1 or rest not in ([], ["padded"]):
            raise ValueError(f"no regime {key!r}")
        return Regime(int(batch), kind == "drawn", int(length), bool(rest))


def length_class(tokens: float) -> int:
    """Return the class of texts of so many tokens: 0 below 256, 1 below 1,024, 2 below 4,096, and so on."""
    return ((int(tokens) // SHORT).bit_length() + 1) // 2


def regime_of(context: Context) -> Regime:
    """Return the regime of a step."""
    slots = context.slots
    mean = sum(context.cache.lengths[slot] for slot in slots) / len(slots)
    is_drawn, is_padded = not context.distribution.is_greedy(slots), context.cache.row_count > 1
    return Regime(len(slots), is_drawn, length_class(mean), is_padded)


def nearest(regime: Regime, others: Sequence[Regime]) -> Regime | None:
    """Return the most similar of ``others``; None where none is similar enough to begin with what was seen there."""
    near = {}
    for other in others:
        ratio = max(other.batch, regime.batch) / min(other.batch, regime.batch)
        is_alike = (other.is_drawn, other.is_padded) == (regime.is_drawn, regime.is_padded)
        if ratio <= NEAR and is_alike:
            near[other] = (ratio, abs(other.length - regime.length))
    return min(near, key=near.__getitem__, default=None)

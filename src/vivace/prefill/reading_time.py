"""How long a prompt is read, from its length and its schedule.

A part of a schedule is a full reading of the tokens that are left, in its share of the layers; what choosing them takes
is left out, and so are tokens that are guessed first.

A full reading follows ``seconds = a n + b n^2``: the part of the matrices grows with the number of tokens, that of
attention with its square. A last chunk of few tokens takes longer than this law says, so where full readings of as many
tokens as a part has can be timed, those say more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vivace.prefill.schedule import Schedule


@dataclass(frozen=True)
class ReadingTime:
    """Seconds of a full reading."""

    by_token: float
    """a: seconds that each token adds."""
    by_square: float
    """b: seconds that each token adds for each token of the prompt."""

    @staticmethod
    def fit(measured: Mapping[int, float]) -> ReadingTime | None:
        """Return the times that fit full readings best, each in proportion to its length.

        Args:
            measured: seconds by number of tokens.

        Returns:
            The least squares of the relative error, or None where there are fewer than two lengths.
        """
        if len(measured) < 2:
            return None
        rows = [(length / seconds, length**2 / seconds) for length, seconds in measured.items()]  # times (a, b) is 1
        aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
        determinant = aa * bb - ab * ab
        return ReadingTime((a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant)

    def full(self, length: int) -> float:
        """Return the seconds of a full reading."""
        return self.by_token * length + self.by_square * length**2

    def square_share(self, length: int) -> float:
        """Return which share of a full reading grows with the square of its length."""
        return self.by_square * length**2 / self.full(length)


def pruned_time(full: Callable[[int], float], schedule: Schedule, length: int, num_layers: int) -> float:
    """Return the seconds of a reading that prunes.

    Args:
        full: seconds of a full reading, by number of tokens.
        schedule: what goes on.
        length: tokens of the prompt.
        num_layers: of the model.
    """
    parts = zip(schedule.counts(length), schedule.spans(num_layers), strict=True)
    return sum(full(count) * (stop - start) / num_layers for count, (start, stop) in parts)

"""Beam search for one request: which texts go on, which are finished, and when no better one can come.

Words: a *beam* is a text that may still go on; its *total* is the sum of log p of its new tokens. Every step scores all
continuations of all beams and takes the best of them as *candidates*. A candidate that ends (an end token, a stop rule,
the length limit) and is among the first ``num_beams`` becomes a *hypothesis*; the best of the others are the beams of
the next step. A hypothesis is scored by ``total / length ** length_penalty`` (Wu et al. 2016, arXiv:1609.08144, eq. 14,
with the simpler denominator that everybody uses), where length counts new tokens, the end token included.

The rules are those of ``GenerationMixin._beam_search`` in transformers 5, in every detail that a text can depend on:

* log p is taken before processors, which change it like logits;
* ``max(2, 1 + number of end tokens) * num_beams`` candidates are taken, so that enough of them do not end;
* at first only one beam counts; the others begin with a total of -1e9, as does what ended but is needed to go on;
* the search ends when all candidates end, when there are ``num_beams`` hypotheses and ``early_stopping`` is True, or
  when the best beam cannot become better than the worst of ``num_beams`` hypotheses. What it could become is estimated
  from its present length (``early_stopping=False``) or from the longest one (``"never"``, for positive penalties).

**Where we differ:** beams are paths in one slot of the cache. transformers keeps keys and values of every beam and
copies all of them in every step, since beams change places. Here the prompt is stored once; every token of a live beam
is one entry behind it, and a beam is a row that names its own entries (``Step.tail``). A beam that goes on in two ways
needs no copy, and entries that no beam names any more are used again. Beams that are the same text are one row.

What a search remembers are a few dozen integers, which change in every step. They are arrays of numpy, whose calls cost
a fifth of PyTorch's at this size, and the rows of all requests are searched for their best tokens in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivace.errors import ConfigError, shown

EarlyStopping = bool | Literal["never"]
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]
MAX_BEAMS = 64
"""Most beams of a request."""
_OUT = -1.0e9
"""Total of a beam that does not count."""
_BLOCK = 64
"""Number of scores of which the largest is found first."""


@dataclass(frozen=True)
class BeamPlan:
    """How a request is searched, with the argument names of Hugging Face."""

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if not 2 <= self.num_beams <= MAX_BEAMS:
            raise ConfigError(f"num_beams must be between 1 and {MAX_BEAMS}, found {self.num_beams}")
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise ConfigError(
                f"num_return_sequences must be between 1 and num_beams, {self.num_beams}, found "
                f"{self.num_return_sequences}"
            )
        if not abs(self.length_penalty) <= 100:  # nor is one that is not a number
            raise ConfigError(f"length_penalty must be between -100 and 100, found {shown(self.length_penalty)}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping must be true, false or 'never', found {self.early_stopping!r}")


class Hypothesis(NamedTuple):
    """A finished text of a search."""

    tokens: tuple[int, ...]
    """The new tokens, an end token included."""
    score: float
    """Sum of log p of the tokens over ``length ** length_penalty``."""
    is_stopped: bool
    """Whether it ended by itself and not at the length limit."""


class Candidate(NamedTuple):
    """A continuation of a beam."""

    total: float
    row: int
    """Row of the beam that it continues."""
    token: int


class BeamSearch:
    """The beams of one request and what they have finished."""

    def __init__(self, plan: BeamPlan, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Begin with one beam that has no new token; the others do not count yet."""
        self.plan = plan
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.ids: Integers = np.empty((1, 0), dtype=np.int64)
        """(rows, new tokens) what each row has written."""
        self.paths: Integers = self.ids
        """(rows, new tokens) entries of these tokens in the request's slot."""
        self.totals = [0.0] + [_OUT] * (plan.num_beams - 1)
        """Total of each beam, the best first."""
        self.row_of_beam = [0] * plan.num_beams
        self.hypotheses: list[Hypothesis] = []
        """The best first, ``num_beams`` at most."""
        self.can_improve = True
        self.is_done = False
        self.stop = num_prompt_tokens
        """One past the highest entry that the next pass reads or writes."""

    @property
    def length(self) -> int:
        """Return the number of new tokens of every beam."""
        return int(self.ids.shape[1])

    @property
    def is_full(self) -> bool:
        """Return whether there are as many hypotheses as beams."""
        return len(self.hypotheses) == self.plan.num_beams

    def num_candidates(self, num_ends: int) -> int:
        """Return how many continuations a step of a request with so many end tokens looks at."""
        return max(2, 1 + num_ends) * self.plan.num_beams

    def best_of(self, scores: Floats, tokens: Integers, count: int) -> list[Candidate]:
        """Return the ``count`` best continuations, the best first, or all where there are fewer; nothing changes.

        Args:
            scores: (rows, n) the largest log p of each row, at least ``count`` of them unless it has fewer tokens.
            tokens: (rows, n) the tokens that have them.
            count: how many.
        """
        rows = self.row_of_beam
        totals = (scores[rows] + np.array(self.totals, dtype=np.float32)[:, None]).reshape(-1)
        best = np.argsort(-totals, kind="stable")[:count]
        width = scores.shape[1]
        found = zip(totals[best].tolist(), best.tolist(), tokens[rows].reshape(-1)[best].tolist(), strict=True)
        return [Candidate(total, rows[place // width], token) for total, place, token in found]

    def take(self, candidates: Sequence[Candidate], ends: Callable[[int, int], bool]) -> None:
        """Keep the best continuations as beams, and those that ended as hypotheses.

        Args:
            candidates: as ``candidates`` gave them.
            ends: whether the text of a row ends with a further token.
        """
        plan, length = self.plan, self.length + 1
        is_last = length >= self.max_new_tokens
        stops = [ends(candidate.row, candidate.token) for candidate in candidates]
        is_closed = not self.can_improve or (self.is_full and plan.early_stopping is True)
        for candidate, stopped in zip(candidates[: plan.num_beams], stops, strict=False):
            score = _scaled(candidate.total, length, plan.length_penalty)
            if (stopped or is_last) and not is_closed and candidate.total > _OUT:
                tokens = (*self.ids[candidate.row].tolist(), candidate.token)
                self.hypotheses.append(Hypothesis(tokens, score, stopped))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[plan.num_beams :]
        self._go_on(candidates, [stopped or is_last for stopped in stops])
        longest = self.max_new_tokens if self._counts_longest else length
        best = _scaled(self.totals[0], longest, plan.length_penalty)
        self.can_improve &= best > self.hypotheses[-1].score if self.is_full else self.totals[0] > _OUT
        has_enough = self.is_full and plan.early_stopping is True
        self.is_done = not self.can_improve or has_enough or is_last or all(stops)

    @property
    def _counts_longest(self) -> bool:
        return self.plan.early_stopping == "never" and self.plan.length_penalty > 0

    def _go_on(self, candidates: Sequence[Candidate], is_over: Sequence[bool]) -> None:
        """Make the best candidates that are not over the beams of the next step."""
        totals = [one.total + (_OUT if over else 0.0) for one, over in zip(candidates, is_over, strict=True)]
        order = sorted(range(len(candidates)), key=lambda place: -totals[place])[: self.plan.num_beams]
        kept = [(candidates[place].row, candidates[place].token) for place in order]
        rows = list(dict.fromkeys(kept))  # the same text once
        row_of = {pair: row for row, pair in enumerate(rows)}
        self.totals = [totals[place] for place in order]
        self.row_of_beam = [row_of[pair] for pair in kept]
        above = [row for row, _ in rows]
        self.ids = _extended(self.ids[above], [token for _, token in rows])
        paths = self.paths[above]
        free = self._free_entries(paths, len(rows))
        self.paths = _extended(paths, free)
        self.stop = max(self.stop, int(free[-1]) + 1)

    def _free_entries(self, paths: Integers, count: int) -> Integers:
        """Return the lowest entries behind the prompt that no path names, in order."""
        first = self.num_prompt_tokens
        is_free = np.ones(self.stop - first + count, dtype=np.bool_)
        is_free[paths.reshape(-1) - first] = False
        return first + np.flatnonzero(is_free)[:count]

    def num_certain(self, known: int) -> int:
        """Return how many tokens at the beginning every beam and hypothesis has in common, ``known`` at least."""
        texts = [one.tokens for one in self.hypotheses]
        limit = min(self.length, *(len(text) - 1 for text in texts)) if texts else self.length
        place = known
        while place < limit:
            found = set(self.ids[:, place].tolist()) | {text[place] for text in texts}
            if len(found) > 1:
                break
            place += 1
        return place


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest scores of each row of (rows, V), in order, and their places, both on the CPU.

    The largest numbers of a row are in the blocks with the largest maxima, so only these blocks are searched. A row's
    result does not depend on the others.
    """
    rows, width = scores.shape
    whole = width // _BLOCK * _BLOCK
    count = min(count, width)
    if whole < 4 * _BLOCK * count:
        values, places = scores.topk(count)
        return values.cpu(), places.cpu()
    blocks = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2).topk(count).indices
    within = torch.arange(_BLOCK, device=scores.device)
    rest = torch.arange(whole, width, device=scores.device).expand(rows, -1)
    places = torch.cat(((blocks[:, :, None] * _BLOCK + within).flatten(1), rest), 1)
    values, order = scores.gather(1, places).topk(count)
    return values.cpu(), places.gather(1, order).cpu()


def _extended(texts: Integers, last: Sequence[int] | Integers) -> Integers:
    """Return (rows, n) integers with one more at the end of each row."""
    longer = np.empty((len(texts), texts.shape[1] + 1), dtype=np.int64)
    longer[:, :-1], longer[:, -1] = texts, last
    return longer


def _scaled(total: float, length: int, penalty: float) -> float:
    """Return a sum of log-probabilities divided by a power of a length, which may be too large or small for a float."""
    try:
        return total / float(length**penalty)
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf

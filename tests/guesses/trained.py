"""What training makes of the positions at which a drafter guessed: the rows that its objective hands to the head.

Each oracle runs the objective itself over the text that was decided and a path of guesses behind it, with nothing
scored but what follows the root, and hears what the head is given there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.guesses.listening import Ears, Proposal
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.methods.eagle.drafter import EagleLayer
from vivace.methods.medusa.drafter import MedusaHeads
from vivace.methods.multistream import objective
from vivace.train.data import TokenBatch

Path = tuple[int, ...]


@dataclass
class Trained:
    """A frozen model in float32, and an objective with the weights that drafted."""

    model: Decoder
    objective: Any
    ears: Ears
    known: dict[tuple[Path, int | None], Tensor] = field(default_factory=dict, kw_only=True)
    """Residuals of texts that were computed already."""

    def rows(self, proposal: Proposal) -> Mapping[Path, Tensor]:
        """By path from the root, what guesses behind it are read from in training, (E,)."""
        raise NotImplementedError

    def logits(self, path: Path, row: Tensor) -> Tensor:
        """What a row says, (E,) -> (V,)."""
        return self.model.head(row[None])[0]

    def final(self, text: Sequence[int], layers: int | None = None) -> Tensor:
        """Residuals (T, E) of a text at the top, or above so many layers."""
        key = (tuple(text), layers)
        if key not in self.known:
            step = Step.dense(1, len(text))
            self.known[key] = self.model.run(self.model.embed(torch.tensor(text), step), step, 0, layers)
        return self.known[key]

    def guesses(self, text: Sequence[int], first: int) -> Tensor:
        """What the objective reads guesses from (n, E), of a text whose tokens from ``first`` on are scored."""
        tokens = torch.tensor([list(text)])
        batch = TokenBatch(tokens, torch.arange(len(text))[None] >= first)
        with self.ears.listening() as heard:
            for _ in self.objective.losses(self.model, batch):
                pass
        truth = self.final(text)
        return torch.cat([rows for rows in heard if not _are_among(rows, truth)])


def _are_among(rows: Tensor, known: Tensor) -> bool:
    """Whether all rows (n, E) are some of those that are known (m, E): what the model itself says there."""
    if rows.shape[1] != known.shape[1]:
        return False
    return bool((torch.cdist(rows, known).amin(1) < 1e-3 * known.norm(dim=1).mean()).all())


class OfPaths(Trained):
    """A guess is read from the row behind which it stands: early exits, draft models."""

    def rows(self, proposal: Proposal) -> Mapping[Path, Tensor]:
        found: dict[Path, Tensor] = {}
        for path in longest(proposal.guesses):
            rows = self.along(proposal.text, path)
            found |= {path[:depth]: rows[depth] for depth in range(len(path) + 1)}
        return found

    def along(self, text: Sequence[int], path: Path) -> Tensor:
        """Rows of the root and of every guess of a path, (depth + 1, E); the token behind the last is a dummy."""
        return self.guesses([*text, *path, 0], len(text))


class OfStudent(OfPaths):
    """A small model of its own, whose head reads its rows."""

    def logits(self, path: Path, row: Tensor) -> Tensor:
        student: Decoder = self.objective.student
        return student.head(row[None])[0]


@dataclass
class OfVerified(OfPaths):
    """The same, where a row also reads what is known of the last verified position, which lies before the root."""

    behind: dict[tuple[Path, int], Tensor] = field(default_factory=dict, kw_only=True)
    """Rows that were computed already, by the text up to them and how far behind the root they stand."""

    def along(self, text: Sequence[int], path: Path) -> Tensor:
        return torch.stack([self._row((*text, *path[:depth]), depth) for depth in range(len(path) + 1)])

    def _row(self, text: Path, depth: int) -> Tensor:
        """The row of the last of these tokens, which stands so far behind the root; paths of a tree share many."""
        if (text, depth) not in self.behind:
            with _lag(depth + 1):
                self.behind[text, depth] = super().along(text[: len(text) - depth], text[len(text) - depth :])[depth]
        return self.behind[text, depth]


@contextmanager
def _lag(lag: int) -> Iterator[None]:
    """The objective draws how far back the last verified position lies: always this far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda low, high, size: torch.full(size, lag))
        yield


@dataclass
class OfFeatures(OfPaths):
    """EAGLE: a guess is read from what the layer made of the feature before it, deeper down of its own features."""

    layer: EagleLayer

    def along(self, text: Sequence[int], path: Path) -> Tensor:
        (first,) = super().along(text, ())
        known = self.model.norm(self.final(text))
        features, rows = torch.cat((torch.zeros(1, known.shape[1]), known[:-1])), [first]
        for depth in range(len(path)):
            so_far = torch.tensor([*text, *path[: depth + 1]])
            features = torch.cat((features, self.model.norm(rows[-1][None])))
            step = Step.dense(1, len(so_far))
            rows.append(self.layer(features, self.model.embed(so_far, step), step)[-1])
        return torch.stack(rows)


class OfLevels(Trained):
    """All guesses of a depth are read from one row, whichever path leads there."""

    def rows(self, proposal: Proposal) -> Mapping[Path, Tensor]:
        levels = self.levels(proposal.text)
        return {path: levels[len(path)] for path in proposal.guesses}

    def levels(self, text: Sequence[int]) -> Tensor:
        """Rows (levels, E) behind a text; the tokens that stand for later ones are dummies."""
        raise NotImplementedError


DUMMIES = [0] * 8


class OfStreams(OfLevels):
    """Streams of the position before the root, which know the root where they are told."""

    def levels(self, text: Sequence[int]) -> Tensor:
        expected = objective.expected_in_text

        def unheard(*args: Any) -> Any:
            """The early exit asks the head what comes next, for streams to read; no guess is read from it."""
            self.ears.is_open = False
            try:
                return expected(*args)
            finally:
                self.ears.is_open = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objective, "expected_in_text", unheard)
            return self.guesses([*text, *DUMMIES], len(text) - 1)[: self.objective.streams.config.streams]


class OfBlocks(OfLevels):
    """The root, which says what the model itself says, and noise behind it."""

    def levels(self, text: Sequence[int]) -> Tensor:
        noise = self.guesses([*text, *DUMMIES], len(text))[: self.objective.weights.config.block - 1]
        return torch.cat((self.final(text)[-1:], noise))


class OfHeads(OfLevels):
    """Medusa's heads, which all read the position before the root."""

    def levels(self, text: Sequence[int]) -> Tensor:
        read: list[Tensor] = []
        of = MedusaHeads.logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                MedusaHeads, "logits", lambda self, head, x, model: (read.append(x), of(self, head, x, model))[1]
            )
            tokens = torch.tensor([[*text, *DUMMIES]])
            batch = TokenBatch(tokens, torch.arange(tokens.shape[1])[None] >= len(text) - 1)
            for _ in self.objective.losses(self.model, batch):
                pass
        return torch.stack([rows[0] for rows in read])

    def logits(self, path: Path, row: Tensor) -> Tensor:
        heads: MedusaHeads = self.objective.heads
        return heads.logits(len(path), row[None], DraftHead(self.model))[0]


def longest(paths: Mapping[Path, Any]) -> list[Path]:
    """Those that are not the beginning of another."""
    return [path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)]

"""Follows one answer while it is written, and says how much of it may be shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from vivace.adapters.guard.head import Features, GuardHead
from vivace.adapters.guard.rules import RuleSearch
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.decode.guarding import ALLOWED, GuardVerdict

Norm = Callable[[Tensor], Tensor]
"""The model's last norm, (n, E) -> (n, E)."""


class TextWatch:
    """Fills ``Watch``: rules read the text, a head reads residuals.

    The residual of a token comes with the token that follows it. So where a head judges answers, the last token is held
    back until the next one is there, or the text ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        searches: Sequence[RuleSearch],
        head: GuardHead | None,
        norm: Norm,
        *,
        notes_all: bool = False,
    ) -> None:
        """Begin without a token.

        Args:
            tokenizer: turns tokens into the text that rules read, which is the text that is shown.
            searches: of the rules about answers.
            head: judges the prompt and the answer; None for none.
            norm: the model's last norm.
            notes_all: whether ``scores`` has every category of the head, and not only what is over its threshold.
        """
        self.scores: dict[str, float] = {}
        self._stream = tokenizer.stream()
        self._searches = list(searches)
        self._head = head
        self._norm = norm
        self._notes_all = notes_all
        self._text = ""
        self._ends: list[int] = []
        """By token: number of characters that are written with it, or -1 where it ends inside a character."""
        self._num_certain = 0
        width = 0 if head is None else head.weight.shape[1] // 2
        self._prompt, self._answer = Features(width), Features(width)
        self._judges = {where: head is not None and head.judges(where) for where in ("input", "output")}

    @property
    def num_certain(self) -> int:
        """Return how many of the new tokens may be shown whatever follows them."""
        return self._num_certain

    def forked(self) -> TextWatch:
        """Return a watch of a text that begins with all that this one has."""
        other = copy(self)
        other.scores, other._ends = dict(self.scores), list(self._ends)
        other._searches, other._stream = [copy(search) for search in self._searches], self._stream.copy()
        other._prompt, other._answer = self._prompt.copy(), self._answer.copy()
        return other

    def read_prompt(self, hidden: Tensor) -> None:
        """Take residuals of prompt tokens after the last layer, (n, E), the next ones in order."""
        if self._judges["input"]:
            self._prompt.add(self._norm(hidden).float())

    def take(self, tokens: Sequence[int], hidden: Tensor) -> GuardVerdict:
        """Judge the text with further tokens; see ``Watch``."""
        before = self._before(hidden)
        for place, token in enumerate(tokens):
            verdict = before[place] if before else ALLOWED
            if verdict.blocks:
                return verdict
            self._text += self._stream.push((token,))
            self._ends.append(-1 if self._stream.is_waiting else len(self._text))
            verdict = self._read()
            if verdict.blocks:
                return verdict
        return ALLOWED

    def end(self) -> GuardVerdict:
        """Judge the text as one that ends here."""
        self._text += self._stream.finish()
        if self._ends:
            self._ends[-1] = len(self._text)
        return self._read(is_whole=True)

    def _before(self, hidden: Tensor) -> list[GuardVerdict]:
        """Return what the head says about the text before each of some tokens, whose residuals (n, E) they follow."""
        if self._head is None or not any(self._judges.values()):
            return []
        rows = self._norm(hidden).float()
        found: list[GuardVerdict] = []
        if not self._ends and not self._answer.count:  # the first row is that of the last prompt token
            self._prompt.add(rows[:1])
            rows = rows[1:]
            found.append(self._of_prompt(self._head))
        if not self._judges["output"]:
            return found + [ALLOWED] * len(rows)
        scores = self._head.scores(self._answer.each(rows))
        for row in scores:
            verdict = self._head.verdict(row, "output")
            found.append(verdict)
            if verdict.blocks:
                break
        return [self._noted(verdict) for verdict in found]

    def _of_prompt(self, head: GuardHead) -> GuardVerdict:
        """Return what the head says about the prompt, all of whose residuals are read."""
        if not self._judges["input"]:
            return ALLOWED
        scores = head.scores(self._prompt.read())
        if self._notes_all:
            pairs = zip(head.config.categories, head.config.where, scores.tolist(), strict=True)
            self.scores.update({name: score for name, where, score in pairs if where == "input"})
        return self._noted(head.verdict(scores, "input"))

    def _noted(self, verdict: GuardVerdict) -> GuardVerdict:
        if verdict.category is not None:
            self.scores[verdict.category] = max(verdict.score, self.scores.get(verdict.category, 0.0))
        return verdict

    def _read(self, *, is_whole: bool = False) -> GuardVerdict:
        """Judge the text by the rules; note how much of it may be shown."""
        first, blocked = len(self._text), ALLOWED
        for search in list(self._searches):
            found = search.look(self._text, is_whole=is_whole)
            if found.is_certain:
                verdict = self._noted(GuardVerdict(search.rule.category, 1.0, search.rule.action))
                if not verdict.blocks:
                    self._searches.remove(search)  # it is noted, once for each text
                    continue
                blocked = verdict
            if search.rule.action == "block":
                first = min(first, found.start)
        lags = self._judges["output"] and not is_whole
        for place in range(self._num_certain, len(self._ends) - lags):
            if self._ends[place] > first:
                break
            if self._ends[place] >= 0:
                self._num_certain = place + 1
        return blocked


def features_of(norm: Norm, hidden: Tensor) -> Tensor:
    """Return what a head reads of a whole text, from its residuals (n, E) after the last layer, (2 E,)."""
    found = Features(hidden.shape[1])
    with torch.no_grad():
        found.add(norm(hidden).float())
    return found.read()

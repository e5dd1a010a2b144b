"""A guard as a model has it: rules and a head, read from files, and the two questions that they answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vivace.adapters.guard.head import KIND, GuardHead, load_head
from vivace.adapters.guard.rules import Rule, Rules
from vivace.adapters.guard.watch import Norm, TextWatch, features_of
from vivace.checkpoint.files import read_json
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.configuration import build
from vivace.core.model import Decoder
from vivace.decode.guarding import ALLOWED, Guarding, GuardVerdict
from vivace.decode.request import Request
from vivace.errors import ConfigError, NotFoundError, UnsupportedError

RULES = "rules.json"
"""Name of the file of rules inside the folder of a guard."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextGuard:
    """Rules and a head for one model; either may be missing."""

    rules: Rules
    head: GuardHead | None
    tokenizer: Tokenizer
    norm: Norm

    @property
    def categories(self) -> tuple[str, ...]:
        """Return the names of all that it finds."""
        own = () if self.head is None else self.head.config.categories
        return tuple(dict.fromkeys((*self.rules.categories, *own)))

    def check_input(self, text: str, hidden: Tensor | None = None) -> GuardVerdict:
        """Judge a prompt.

        Args:
            text: the prompt.
            hidden: (n, E) residuals of its tokens after the last layer, where there are some.

        Raises:
            UsageError: a rule takes too long on it.
        """
        return self._check(text, hidden, "input")

    def check_output(self, text: str, hidden: Tensor | None = None) -> GuardVerdict:
        """Judge an answer that is complete; see ``check_input``, and ``watch`` for one that is being written."""
        return self._check(text, hidden, "output")

    def _check(self, text: str, hidden: Tensor | None, where: str) -> GuardVerdict:
        found = ALLOWED
        for search in self.rules.searches(where):
            if search.look(text, is_whole=True).is_certain:
                verdict = GuardVerdict(search.rule.category, 1.0, search.rule.action)
                if verdict.blocks:
                    return verdict
                found = verdict
        if self.head is not None and hidden is not None and self.head.judges(where):
            verdict = self.head.verdict(self.head.scores(features_of(self.norm, hidden)), where)
            found = verdict if verdict.category is not None else found
        return found

    def flagged(self, text: str) -> dict[str, float]:
        """Return the categories that the rules about prompts find in a text, with their scores."""
        searches = self.rules.searches("input")
        return {s.rule.category: 1.0 for s in searches if s.look(text, is_whole=True).is_certain}

    def for_prompt(self, tokens: Sequence[int]) -> tuple[Guarding, GuardVerdict | None]:
        """Judge the text of a prompt by the rules.

        Returns:
            What judges the prompt by the head, once it is read, and the answer; and the verdict where it is refused.

        Raises:
            UsageError: a rule takes too long on it.
        """
        text = self.tokenizer.decode(tokens)
        verdict = self.check_input(text)
        if verdict.category is not None:
            log.info("guard: the prompt is of category %s (%s)", verdict.category, verdict.action)
        return GuardedPrompt(self, self.flagged(text)), verdict if verdict.blocks else None


@dataclass(frozen=True)
class GuardedPrompt:
    """Fills ``Guarding``: a guard beside one prompt."""

    guard: TextGuard
    flagged: Mapping[str, float]
    """What the rules found in the prompt."""
    notes_all: bool = False
    """Whether the scores of all categories of the head are noted, not only those over their thresholds."""

    def open(self) -> TextWatch:
        """Return the watch of an answer that has no token yet."""
        searches = self.guard.rules.searches("output")
        watch = TextWatch(self.guard.tokenizer, searches, self.guard.head, self.guard.norm, notes_all=self.notes_all)
        watch.scores.update(self.flagged)
        return watch


def guarded(request: Request, guard: TextGuard) -> Request:
    """Return a request that a guard judges.

    Raises:
        UnsupportedError: it writes several texts at once, of which none is followed.
        UsageError: a rule takes too long on its prompt.
    """
    if request.beams is not None:
        raise UnsupportedError("a guard follows one text, and beams write several; leave out num_beams, or the guard")
    beside, refused = guard.for_prompt(request.tokens)
    return replace(request, guard=beside, refused=refused)


def load_guard(path: str | Path, base: Path, model: Decoder, tokenizer: Tokenizer) -> TextGuard:
    """Read a guard for a model.

    Args:
        path: a file of rules (JSON), or a folder with a head, such a file, or both.
        base: checkpoint of the model.
        model: whose residuals a head reads.
        tokenizer: of the model.

    Raises:
        CheckpointError: it is missing, broken or of another model.
        ConfigError: a rule is wrong.
    """
    place = Path(path)
    if tokenizer.is_missing:
        raise ConfigError("this checkpoint has no tokenizer, so a guard has no text to judge; leave out guard")
    if model.encoder is not None:
        raise ConfigError("a guard is for decoders without an encoder; leave it out")
    if place.is_file():
        return TextGuard(read_rules(place), None, tokenizer, model.norm)
    if not place.is_dir():
        raise NotFoundError(f"there is no guard {place}; give a file of rules or a folder of `vivace train guard`")
    has_rules, has_head = (place / RULES).is_file(), (place / "config.json").is_file()
    if not has_rules and not has_head:
        raise NotFoundError(f"{place} has neither {RULES} nor a trained {KIND} (config.json)")
    head = load_head(place, base, model.config.width) if has_head else None
    return TextGuard(read_rules(place / RULES) if has_rules else Rules(), head, tokenizer, model.norm)


def read_rules(path: Path) -> Rules:
    """Read a file of rules: ``{"rules": [{"category": ..., "kind": ...}, ...]}``.

    Raises:
        CorruptError: it is not JSON.
        ConfigError: a rule is wrong; the message names it.
    """
    read = read_json(path)
    if set(read) != {"rules"} or not isinstance(read["rules"], list) or not read["rules"]:
        raise ConfigError(f'{path}: expected {{"rules": [...]}} with one rule or more')
    rules = []
    for number, values in enumerate(read["rules"], 1):
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, rule {number}: expected an object, found {json.dumps(values)[:100]}")
        try:
            rules.append(build(Rule, values))
        except ConfigError as error:
            raise ConfigError(f"{path}, rule {number}: {error}") from error
    return Rules(tuple(rules))

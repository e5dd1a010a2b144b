"""Rules: what a text must not contain and can be spelt out, each found in bounded time and as early as possible.

A text is judged while it is written. So a rule does not only say whether it is there, but also from which character on
something may still become it: those characters are held back. A find that reaches the end of what is written may yet
grow or turn out to be another word, and is held back as well, until something follows it or the text ends. A rule's
verdict is then the same, however the text was divided.

Patterns run in the package ``regex``, which knows partial matches and gives up after a time: a pattern that explodes is
an error of one request and hangs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import regex  # type: ignore[import-untyped]

from vivace.adapters.guard.numbers import is_card, is_iban
from vivace.decode.guarding import Action
from vivace.errors import ConfigError, UnsupportedError

SEARCH_S = 0.1
"""Seconds of its thread after which a single search is given up."""
TEXT_S = 1.0
"""Seconds of its thread that one rule may take for one text, over all of its searches and checks."""
LONGEST_PATTERN = 20_000
"""Characters of a pattern, or of all words of a list together."""

_SEPARATED = r"[ \u00a0\-]{0,2}"
_EMAIL = (
    r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
_CARD = rf"(?<!\d)\d(?:{_SEPARATED}\d){{12,40}}(?!\d){_SEPARATED}"
_IBAN = rf"(?<![A-Za-z0-9])[A-Za-z]{{2}}\d{{2}}(?:{_SEPARATED}[A-Za-z0-9]){{11,30}}{_SEPARATED}"


class Found(NamedTuple):
    """What a rule says about a text as far as it is written."""

    start: int
    """Character before which the text has nothing to do with the rule; a find begins here."""
    is_certain: bool
    """Whether something was found, and nothing that follows can change that."""


@dataclass(frozen=True)
class Rule:
    """Something that a text must not contain."""

    category: str
    """What it is called in verdicts and logs."""
    kind: Literal["email", "card", "iban", "pattern", "words"] = "pattern"
    """What is looked for: e-mail addresses, card numbers and IBANs with their check digits, a pattern, or words."""
    pattern: str | None = None
    """The pattern, as the package ``regex`` reads it."""
    words: tuple[str, ...] = ()
    """Words or phrases, found whole and in any case."""
    where: Literal["input", "output", "both"] = "both"
    """Whether prompts are judged, answers, or both."""
    action: Action = "block"
    """What follows: "block", or "flag", which only notes it."""

    def __post_init__(self) -> None:
        if not self.category or len(self.category) > 100 or not self.category.isprintable():
            raise ConfigError(f"a rule's category is a name of 1 to 100 characters, found {self.category[:100]!r}")
        given = {"pattern": self.pattern is not None, "words": bool(self.words)}
        for name, is_given in given.items():
            if is_given != (self.kind == name):
                what = f"needs {name}" if not is_given else f"takes no {name}"
                raise ConfigError(f"rule {self.category!r}: kind {self.kind!r} {what}")
        if any(not word.strip() for word in self.words):
            raise ConfigError(f"rule {self.category!r}: a word must not be empty")
        self.compiled  # noqa: B018 - a pattern that is wrong is refused before anything runs

    @cached_property
    def compiled(self) -> Any:
        """The compiled pattern.

        Raises:
            ConfigError: it is none, is too long, or finds nothing at all as something.
        """
        source = {"email": _EMAIL, "card": _CARD, "iban": _IBAN}.get(self.kind) or self._own()
        if len(source) > LONGEST_PATTERN:
            raise ConfigError(f"rule {self.category!r} has {len(source)} characters; {LONGEST_PATTERN} at most")
        try:
            compiled = regex.compile(source)
            is_empty = compiled.search("", timeout=SEARCH_S) is not None
        except regex.error as error:
            raise ConfigError(f"rule {self.category!r}: the pattern cannot be read: {error}") from error
        except TimeoutError as error:
            raise ConfigError(f"rule {self.category!r}: the pattern takes too long on an empty text") from error
        if is_empty:
            raise ConfigError(f"rule {self.category!r}: the pattern finds the empty text everywhere")
        return compiled

    def _own(self) -> str:
        if self.pattern is not None:
            return self.pattern
        words = sorted((" ".join(word.split()) for word in self.words), key=len, reverse=True)
        spelt = "|".join(r"\s+".join(regex.escape(part) for part in word.split()) for word in words)
        return rf"(?i)(?<!\w)(?:{spelt})(?!\w)"

    @property
    def check(self) -> Callable[[str], bool] | None:
        """Return what checks the digits of a match, for kinds of numbers that have check digits; None for others."""
        return {"card": is_card, "iban": is_iban}.get(self.kind)


@dataclass
class RuleSearch:
    """Looks for one rule in a text that grows."""

    rule: Rule
    start: int = 0
    """Character before which nothing can begin any more."""
    spent_s: float = 0.0

    def look(self, text: str, *, is_whole: bool = False) -> Found:
        """Look for the rule in a text.

        Args:
            text: what is written so far; it begins with the text of the last call.
            is_whole: whether nothing follows.

        Raises:
            UnsupportedError: it takes too long.
        """
        while True:
            match = self._search(text, is_whole)
            if match is None:
                self.start = len(text)
                return Found(self.start, False)
            is_open = not is_whole and (match.partial or match.end() == len(text))
            if is_open or self._is_right(match.group()):
                self.start = match.start()
                return Found(self.start, not is_open)
            self.start = match.start() + 1  # its check digits are wrong, and another may begin within it

    def _is_right(self, found: str) -> bool:
        """Return whether the check digits of what was found are right, if it has any."""
        begun = time.thread_time()
        try:
            return self.rule.check is None or self.rule.check(found)
        finally:
            self.spent_s += time.thread_time() - begun

    def _search(self, text: str, is_whole: bool) -> Any:
        begun, limit = time.thread_time(), SEARCH_S
        try:
            if self.spent_s > TEXT_S:
                raise TimeoutError
            while True:
                tried = time.thread_time()
                try:
                    return self.rule.compiled.search(text, self.start, partial=not is_whole, timeout=limit)
                except TimeoutError:  # the package counts what all threads of the process take together
                    if time.thread_time() - tried >= SEARCH_S:
                        raise
                    limit *= 4
        except TimeoutError as error:
            raise UnsupportedError(
                f"the guard's rule {self.rule.category!r} takes too long on this text; write its pattern without "
                "nested repetitions"
            ) from error
        finally:
            self.spent_s += time.thread_time() - begun


@dataclass(frozen=True)
class Rules:
    """The rules of a guard."""

    rules: tuple[Rule, ...] = field(default=())

    def searches(self, where: str) -> list[RuleSearch]:
        """Return a new search for each rule about prompts ("input") or answers ("output")."""
        return [RuleSearch(rule) for rule in self.rules if rule.where in (where, "both")]

    @property
    def categories(self) -> Sequence[str]:
        """Return the names of what is looked for, each once."""
        return tuple(dict.fromkeys(rule.category for rule in self.rules))

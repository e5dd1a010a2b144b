"""Data augmentation of training pairs: the same task with names and values that the model has not seen.

A small model learns to copy names and values from the prompt only if it cannot memorise them. There are three changes.
The recipe gives regular expressions for the values they apply to, so nothing here depends on a task:

* *respell*: a value of the answer that the prompt has in other letter case is spelled as in the prompt;
* *invent*: a value that occurs in both prompt and answer is replaced in both by invented words;
* *shuffle*: a list in the prompt, whose items are separated by ", ", is put into a random order.

All random choices come from a generator that the caller seeds for each epoch, so a resumed run sees the same pairs.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError

Pair = tuple[str, str]
"""Prompt and answer, both as text."""


def digest_of(pairs: Iterable[tuple[object, object]]) -> str:
    """Return sixteen hexadecimal digits that tell pairs of prompt and answer, in their order, from others."""
    digest = hashlib.blake2b(digest_size=8)
    for pair in pairs:
        digest.update(repr(pair).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


_WORD = re.compile(r"\w+")
_BORROWED = re.compile(r"(?<!\w)[A-Z][a-z]{2,9}(?!\w)")
_SYLLABLES = [
    *(c + v for c in "bcdfghjklmnprstvwyz" for v in "aeiou"),
    *("ck", "ll", "nd", "st", "er", "on", "el", "is"),
]


@dataclass(frozen=True)
class VariationConfig:
    """Which values are changed, and how often."""

    values: tuple[str, ...] = ()
    """Regular expressions whose last group is a value, such as ``name\\[([^]]+)\\]`` or ``= "([^"]+)"``."""
    respell: bool = False
    """Whether values of the answer are spelled as in the prompt."""
    invent: float = 0.0
    """Share of pairs whose values are replaced by invented words."""
    shuffle: str | None = None
    """Regular expression whose last group is a list in the prompt, which is shuffled in half of the pairs."""

    def __post_init__(self) -> None:
        if not 0 <= self.invent <= 1:
            raise ConfigError(f"variation.invent is a share between 0 and 1, found {self.invent}")
        for expression in (*self.values, *([self.shuffle] if self.shuffle else [])):
            try:
                groups = re.compile(expression).groups
            except re.error as exc:
                raise ConfigError(f"variation has {expression!r}, not a regular expression: {exc}") from exc
            if groups < 1:
                raise ConfigError(f"variation has {expression!r} without a group; put ( ) around the value")


class Variation:
    """Changes pairs as a ``VariationConfig`` says."""

    def __init__(self, config: VariationConfig, pairs: Iterable[Pair]) -> None:
        """Compile the regular expressions and collect words to invent values from.

        Args:
            config: what to change.
            pairs: pairs whose capitalised words are used as invented words.
        """
        self.config = config
        self._values = [re.compile(expression) for expression in config.values]
        self._list = re.compile(config.shuffle) if config.shuffle else None
        self._bag = sorted({word for _, answer in pairs for word in _BORROWED.findall(answer)}) or ["Fen"]

    def respelled(self, pair: Pair) -> Pair:
        """Return the pair with the answer's values spelled as in the prompt; nothing is random here."""
        prompt, answer = pair
        lowered = prompt.lower()
        if not self.config.respell or len(lowered) != len(prompt) or not self._varies(pair):
            return pair
        for value in self._found(answer):
            at = lowered.find(value.lower())
            if at >= 0:
                answer = self._replaced(answer, value, prompt[at : at + len(value)])
        return prompt, answer

    def drawn(self, pair: Pair, rng: random.Random) -> Pair:
        """Return a random variation of a pair, possibly the pair itself."""
        prompt, answer = pair
        if not self._varies(pair):
            return pair
        if self._list is not None and rng.random() < 0.5:
            prompt = self._shuffled(prompt, rng)
        if rng.random() >= self.config.invent:
            return prompt, answer
        for value in self._found(prompt, answer):
            whole = re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")  # not a part of a longer word
            if len(value) > 1 and prompt.count(value) == 1 and whole.search(prompt) and whole.search(answer):
                new = _WORD.sub(lambda m: self._word_like(m[0], rng) if rng.random() < 0.8 else m[0], value)
                prompt, answer = (new.join(whole.split(text)) for text in (prompt, answer))
        return prompt, answer

    def exercise(self, pair: Pair, rng: random.Random) -> Pair | None:
        """Return the prompt with invented values and those values as its answer; None when it has no values."""
        prompt, answer = pair
        if not self._varies(pair):
            return None
        copied: list[tuple[int, str]] = []  # where each invented value stands: one may be a part of another
        for value in self._found(prompt, answer):
            at = prompt.find(value)
            is_invented = any(start <= at < start + len(word) for start, word in copied)
            if len(value) > 1 and prompt.count(value) == 1 and not is_invented:
                new = _WORD.sub(lambda m: self._word_like(m[0], rng), value)
                prompt = prompt.replace(value, new)
                longer = len(new) - len(value)
                copied = [*((start + longer if start > at else start, word) for start, word in copied), (at, new)]
        return (prompt, ", ".join(word for _, word in sorted(copied))) if copied else None

    @staticmethod
    def _varies(pair: Pair) -> bool:
        """Return whether a pair is of two plain texts; the turns of a conversation stay as they are."""
        return type(pair[0]) is str

    def _found(self, *texts: str) -> list[str]:
        """Return the distinct values in the texts, longest first, so that a part of another value comes after it."""
        found = {m[m.re.groups] for text in texts for values in self._values for m in values.finditer(text)}
        return sorted((value for value in found if value), key=lambda value: (-len(value), value))

    def _replaced(self, text: str, value: str, new: str) -> str:
        """Return the text with a value replaced only where an expression finds it."""

        def swap(match: re.Match[str]) -> str:
            place = match.re.groups
            if match[place] != value:
                return match[0]
            first, stop = (offset - match.start() for offset in match.span(place))
            return match[0][:first] + new + match[0][stop:]

        for values in self._values:
            text = values.sub(swap, text)
        return text

    def _shuffled(self, prompt: str, rng: random.Random) -> str:
        assert self._list is not None
        match = self._list.search(prompt)
        found = None if match is None else match[match.re.groups]
        if match is None or found is None:  # no match, or one without the list, whose group is optional
            return prompt
        items = found.split(", ")
        rng.shuffle(items)
        first, stop = match.span(match.re.groups)
        return prompt[:first] + ", ".join(items) + prompt[stop:]

    def _word_like(self, word: str, rng: random.Random) -> str:
        """Return an invented word of the same kind: digits, upper case, capitalised or lower case."""
        if word.isdigit():
            if len(word) == 1 or word[0] == "0":
                return str(rng.randint(0, 9))
            return "".join(rng.choice("0123456789") for _ in word)
        made = rng.choice(self._bag) if rng.random() < 0.6 else _composed(rng)
        if word.isupper() and len(word) > 1:
            return made.upper()
        return made if word[0].isupper() else made.lower()


def _composed(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()


def copying_exercises(pairs: Sequence[Pair], share: float, variation: Variation, rng: random.Random) -> list[Pair]:
    """Return pairs whose answer is only the prompt's values; trained on some of them, a model copies sooner.

    Args:
        pairs: real pairs, whose values are replaced by invented ones.
        share: number of exercises per real pair.
        variation: finds the values and invents words.
        rng: generator of the random choices.
    """
    drawn = rng.choices(pairs, k=int(len(pairs) * share)) if pairs else []
    return [exercise for pair in drawn if (exercise := variation.exercise(pair, rng)) is not None]

"""Other versions of a training pair: the same task with words the model has not seen.

A small model learns to *copy* names and values only if remembering them does not pay. Three changes, all
found by regular expressions that the recipe gives, so this file knows no task:

* *respell*: a value of the answer that the prompt has in another case is written as the prompt writes it;
* *invent*: a value that stands in both prompt and answer gets invented words in both;
* *shuffle*: a list in the prompt, items apart by ", ", gets another order.

Everything is drawn from a generator that the caller seeds by epoch, so a resumed run sees the same pairs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError

Pair = tuple[str, str]
"""Prompt and answer, both as text."""

_WORD = re.compile(r"\w+")
_BORROWED = re.compile(r"(?<!\w)[A-Z][a-z]{2,9}(?!\w)")
_SYLLABLES = [
    *(c + v for c in "bcdfghjklmnprstvwyz" for v in "aeiou"),
    *("ck", "ll", "nd", "st", "er", "on", "el", "is"),
]


@dataclass(frozen=True)
class VariationConfig:
    """Which values vary, and how often."""

    values: tuple[str, ...] = ()
    """Expressions whose last group is a value: ``name\\[([^]]+)\\]``, ``= "([^"]+)"``."""
    respell: bool = False
    """Write the answer's values as the prompt does."""
    invent: float = 0.0
    """Share of pairs whose values get invented words."""
    shuffle: str | None = None
    """Expression whose last group is a list of the prompt; half of the pairs get another order."""

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
    """Draws other versions of pairs."""

    def __init__(self, config: VariationConfig, pairs: Iterable[Pair]) -> None:
        """Prepare.

        Args:
            config: what to change.
            pairs: where capitalised words are borrowed from.
        """
        self.config = config
        self._values = [re.compile(expression) for expression in config.values]
        self._list = re.compile(config.shuffle) if config.shuffle else None
        self._bag = sorted({word for _, answer in pairs for word in _BORROWED.findall(answer)}) or ["Fen"]

    def respelled(self, pair: Pair) -> Pair:
        """The pair with the answer's values as the prompt writes them; drawn from nothing."""
        prompt, answer = pair
        lowered = prompt.lower()
        if not self.config.respell or len(lowered) != len(prompt):
            return pair
        for value in self._found(answer):
            at = lowered.find(value.lower())
            if at >= 0:
                answer = self._replaced(answer, value, prompt[at : at + len(value)])
        return prompt, answer

    def drawn(self, pair: Pair, rng: random.Random) -> Pair:
        """Another version of a pair, or the pair itself."""
        prompt, answer = pair
        if self._list is not None and rng.random() < 0.5:
            prompt = self._shuffled(prompt, rng)
        if rng.random() >= self.config.invent:
            return prompt, answer
        for value in self._found(prompt, answer):
            if len(value) > 1 and prompt.count(value) == 1 and value in answer:
                new = _WORD.sub(lambda m: self._word_like(m[0], rng) if rng.random() < 0.8 else m[0], value)
                prompt, answer = prompt.replace(value, new), answer.replace(value, new)
        return prompt, answer

    def exercise(self, pair: Pair, rng: random.Random) -> Pair | None:
        """The prompt with invented values, and those values as its answer; None when nothing can be copied."""
        prompt, answer = pair
        copied = []
        for value in self._found(prompt, answer):
            if len(value) > 1 and prompt.count(value) == 1:
                new = _WORD.sub(lambda m: self._word_like(m[0], rng), value)
                prompt = prompt.replace(value, new)
                copied.append(new)
        copied.sort(key=prompt.find)
        return (prompt, ", ".join(copied)) if copied else None

    def _found(self, *texts: str) -> list[str]:
        """Values in the texts, each once, longest first so that a part of another comes later."""
        found = {m[m.re.groups] for text in texts for values in self._values for m in values.finditer(text)}
        return sorted((value for value in found if value), key=lambda value: (-len(value), value))

    def _replaced(self, text: str, value: str, new: str) -> str:
        """The text with a value replaced where an expression finds it, and nowhere else."""

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
        if match is None:
            return prompt
        items = match[match.re.groups].split(", ")
        rng.shuffle(items)
        first, stop = match.span(match.re.groups)
        return prompt[:first] + ", ".join(items) + prompt[stop:]

    def _word_like(self, word: str, rng: random.Random) -> str:
        """An invented word of the same kind: digits, capitals, capitalised or lower case."""
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
    """Pairs whose answer is nothing but the prompt's values: with some of them, copying is learnt sooner.

    Args:
        pairs: real pairs; their values are replaced by invented ones.
        share: exercises per real pair.
        variation: finds the values and invents words.
        rng: what to draw from.
    """
    drawn = rng.choices(pairs, k=int(len(pairs) * share)) if pairs else []
    return [exercise for pair in drawn if (exercise := variation.exercise(pair, rng)) is not None]

"""Restoring the spacing of tokenised text: ``family - friendly , £ 20 .`` becomes ``family-friendly, £20.``

The train split of E2E is published with spaces around punctuation, its dev split as people wrote it. The original
spacing is not always determined, so the rules follow what the dev split mostly does: words around a
hyphen are joined unless a clause starts after it, and a price range is written ``£20-25``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_CLITIC = re.compile(r"(?<=\w) '(?=(?:s|t|re|ll|ve|d|m|oeuvres?)\b)")
_CLAUSE = (
    r"(?:a|an|the|it|its|they|this|that|there|and|but|with|for|near|in|at|on|is|has|not|just|located|offering|serves|"
    r"you|try|great|perfect|if|as)\b"
)
_VERBS_WITH_IN = r"(?:sit|eat|dine|drop|walk|take|drive|check|stay|non|fun|all)"

Replacement = str | Callable[[re.Match[str]], str]

_RULES: tuple[tuple[re.Pattern[str], Replacement], ...] = (
    (re.compile(r"£\s+(?=[\d-])"), "£"),
    (re.compile(r"(?<=\d)\s*-\s*(?=£?\d)"), "-"),
    (re.compile(r"(?<=£)\s*-\s*(?=\d)"), "-"),
    (re.compile(rf"(?<![\w-])({_VERBS_WITH_IN})\s?-\s?(?=\w)", re.IGNORECASE), r"\1-"),
    (re.compile(rf"(?<=\w)\s?-\s?(?=\w)(?!{_CLAUSE}(?! ?-))"), "-"),
    (re.compile(r"(?<=\w)\s?-\s(?=[a-z])"), " - "),
    (re.compile(r"-\s+(?=£)"), "-"),
    (_CLITIC, "'"),
    (re.compile(r"(?<=\w) ' s\b"), "'s"),
    (re.compile(r"\s+([.,;:!?]+)(?=\s|$|['\"])"), r"\1"),
    (re.compile(r"\s+([.,;:!?])(?=[A-Za-z])"), r"\1 "),
    (re.compile(r"(?<=\w)\s/\s(?=\w)"), "/"),
    (re.compile(r"\(\s+"), "("),
    (re.compile(r"\s+\)"), ")"),
)

_PUNCTUATION = re.compile(r" [.,]( |$)")


def detokenise(text: str) -> str:
    """Remove the spaces that a tokeniser put around punctuation."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _join_quotes(" ".join(text.split()))


def is_tokenised(texts: Iterable[str]) -> bool:
    """Return whether most of the texts have a space before a full stop or a comma."""
    marks = [_PUNCTUATION.search(text) is not None for text in texts]
    return sum(marks) * 2 > len(marks)


def _join_quotes(text: str) -> str:
    """Attach quotation marks, opening ones to the right and closing ones to the left; a lone one is a plural's
    apostrophe.
    """
    for mark in ("'", '"'):
        alone = re.compile(rf"(?<!\w){mark}|{mark}(?!\w)")
        spots = [match.start() for match in alone.finditer(text)]
        for first, second in list(zip(spots[::2], spots[1::2], strict=False))[::-1]:
            inside = text[first + 1 : second].strip()
            text = f"{text[:first].rstrip()} {mark}{inside}{mark}{text[second + 1 :]}".lstrip()
        if len(spots) % 2:
            text = re.sub(rf"(?<=s) {mark}(?= |[.,]|$)", mark, text)
    return re.sub(r"(?<=['\"]) (?=[.,;:!?])", "", text)

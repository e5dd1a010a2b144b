"""Slot errors of the E2E task: which values of a meaning representation a text omits or gets wrong.

A *slot* is one attribute of a meaning representation with its value. For each slot the text is searched:

* ``name`` and ``near``: the value itself, in any case, with or without a leading "The". It is found or *missing*. The
  longer one is looked for first, since the other may be a part of it. One without a value is no slot.
* any other attribute: a phrase of the paraphrase table below. *Right* if a phrase of the value is found; else
  *wrong* if a phrase of another value of that attribute is found; else *missing*.
* an attribute that the representation does not have but the text expresses counts as *added*, separately.

The writers of the data used amounts and words for prices and ratings alike ("less than £20" and "cheap", "1 out of
5" and "low"), so each of the three levels of the two attributes is one class, and an amount or number counts too.
Names are removed before phrases are searched, because "Café Rouge" does not tell what kind of place it is near.

The slot error rate is (wrong + missing) / slots, as in Dušek et al. 2020 (arXiv 1901.07931) except for added slots,
which are reported separately. The table of phrases is incomplete; it serves to compare systems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

_SLOT = re.compile(r"(\w[\w ]*)\[([^\]]*)\]")
_OPEN = ("name", "near")

_RATED = r"(?:rat(?:ed|ing|ings|es)|reviews?|reviewed|satisfaction|quality|recommended|star|stars)"
_PRICED = r"(?:price\w*|pricing|cost\w*)"


def _near(adjective: str, noun: str) -> str:
    """Return an expression for an adjective before or after a noun, with a few words of the same clause between
    them.
    """
    return rf"\b{adjective}[ -](?:\w+[ -]){{0,2}}{noun}\b|\b{noun}\b[^.,;£]{{0,22}}\b{adjective}\b"


_CHEAP = r"\bcheap\w*|\binexpensive|\baffordabl|\bbudget|\blow[- ](?:\w+[ -])?cost|\beconomical|" + (
    _near("low(?:er)?", _PRICED) + r"|\b(?:less|lower|cheaper) (?:than|then) £?20|\b(?:under|below) £?20|\bup to £?20"
)
_MODERATE = r"\bmoderate|\breasonabl\w*|\bmid(?:dle)?[- ](?:range|price|level|cost)|\b20 ?(?:-|to|and) ?£?25|" + (
    _near("(?:average|medium|fair|normal|standard|mid)", _PRICED) + r"|\bfairly[- ]priced|\baverage[- ]priced"
)
_DEAR = (
    r"(?<!in)\b(?:expensive|pricey|costly|dear)\b|\bhigh[- ]end|\bupscale|\bupper|\bpremium|\bhigh[- ](?:\w+[ -])?cost|"
    + (
        _near("high(?:er|ly|ish)?", _PRICED)
        + r"|\b(?:more|higher|greater) (?:than|then) £?30|\b(?:over|above|exceed\w*) £?30"
    )
)
_LOW = r"\b(?:1|one)(?:/5| out\b| of|[- ]stars?)|\bpoor\w*|\bbad\w*|\bunpopular|\bnot (?:well|highly)[- ]|" + (
    _near("low(?:er|ly|est)?", _RATED)
)
_MIDDLING = r"\b(?:3|three)(?:/5| out\b| of|[- ]stars?)|\bmediocre|\bdecent|\bsatisfactory|\baverage[- ]rated|" + (
    _near("(?:average|middling|moderate|ok|okay)(?:ly)?", _RATED) + r"|\baverage(?! pric)"
)
_GREAT = (
    r"\b(?:5|five)(?:/5| out\b| of|[- ]stars?)|\bexcellent|\bgreat|\btop[- ]|\bwell[- ]|\bbest|\bhighly(?![- ]pric)|"
    + (_near("(?:high(?:er|ly|est)?|good|outstanding|perfect)", _RATED))
)
_CHILDREN = r"(?:famil\w+|kids?|child\w*|teen\w*)"
_UNFRIENDLY = (
    rf"\b(?:no|not|non|n't|isn't|aren't|doesn't|don't|isnt|without|never|nor|un)\b[^.,;]{{0,45}}\b{_CHILDREN}|"
    rf"\b{_CHILDREN}[^.,;]{{0,15}}\b(?:not|free|unfriendly|aren't|isn't)\b|\badults?\b|\bunfriendly"
)

PHRASES: Mapping[str, Mapping[str, str]] = {
    "eatType": {
        "coffee shop": r"\bcoffee|\bcaf[eé]s?\b|\btea ?room",
        "pub": r"\bpubs?\b|\bbars?\b|\btavern|\binn\b",
        "restaurant": r"\brestaur\w*|\beatery|\bdiner|\bdining|\bbistro|\bestablishment|\bvenue|\bplace\b",
    },
    "food": {
        "Chinese": r"\bchinese",
        "English": r"\benglish|\bbritish|\bbreakfast|\bfish and chips",
        "Fast food": r"\bfast[- ]?food|\bburgers?\b|\bfries\b",
        "French": r"\bfrench|\bwines?\b|\bcheeses?\b",
        "Indian": r"\bindian|\bcurr(?:y|ies)\b",
        "Italian": r"\bitalian|\bpastas?\b|\bpizzas?\b",
        "Japanese": r"\bjapanese|\bsushi",
    },
    "priceRange": {"low": _CHEAP, "middle": _MODERATE, "high": _DEAR},
    "customer rating": {"low": _LOW, "middle": _MIDDLING, "high": _GREAT},
    "area": {
        "riverside": r"\briver|\bwater(?:side|front)?\b|\bbanks? of",
        "city centre": r"cent(?:re|er)\b|\bcentral|\bheart of|\bdowntown|\bin the city",
    },
    "familyFriendly": {"no": _UNFRIENDLY, "yes": rf"\b{_CHILDREN}|\ball ages"},
}
"""For each attribute and class of values, a regular expression that any phrase for it matches (in lower case)."""

CLASSES: Mapping[str, Mapping[str, str]] = {
    "priceRange": {
        "cheap": "low",
        "less than £20": "low",
        "moderate": "middle",
        "£20-25": "middle",
        "high": "high",
        "more than £30": "high",
    },
    "customer rating": {
        "low": "low",
        "1 out of 5": "low",
        "average": "middle",
        "3 out of 5": "middle",
        "high": "high",
        "5 out of 5": "high",
    },
}
"""Class of each value; any other value is its own class."""


@dataclass(frozen=True)
class SlotErrors:
    """Counts over one text or many; they can be added with ``+``."""

    num_slots: int = 0
    num_wrong: int = 0
    num_missing: int = 0
    num_added: int = 0

    @property
    def rate(self) -> float:
        """Share of slots that are wrong or missing; 0 if there are none."""
        return (self.num_wrong + self.num_missing) / self.num_slots if self.num_slots else 0.0

    def __add__(self, other: SlotErrors) -> SlotErrors:
        return SlotErrors(
            self.num_slots + other.num_slots,
            self.num_wrong + other.num_wrong,
            self.num_missing + other.num_missing,
            self.num_added + other.num_added,
        )


def parse_slots(mr: str) -> dict[str, str]:
    """Return attributes and values of ``"name[Fen House], area[riverside]"``, which may stand inside a prompt."""
    return {attribute.strip(): value.strip() for attribute, value in _SLOT.findall(mr)}


def slot_errors(mr: str, text: str) -> SlotErrors:
    """Count the slot errors of one text."""
    slots = parse_slots(mr)
    lowered = text.lower().replace("’", "'")
    counts = {"right": 0, "wrong": 0, "missing": 0}
    names = [_bare(slots[attribute]) for attribute in _OPEN if slots.get(attribute)]
    for name in sorted(names, key=len, reverse=True):
        counts["right" if name in lowered else "missing"] += 1
        lowered = lowered.replace(name, " ")
    num_added = 0
    for attribute in PHRASES:
        found = expressed(attribute, lowered)
        if attribute in slots:
            value = _class_of(attribute, slots[attribute])
            counts["right" if value in found else "wrong" if found else "missing"] += 1
        elif attribute != "eatType":  # every text calls its subject "a place" or "a restaurant"
            num_added += bool(found)
    return SlotErrors(sum(counts.values()), counts["wrong"], counts["missing"], num_added)


def total_slot_errors(mrs: Sequence[str], texts: Sequence[str]) -> SlotErrors:
    """Add up the slot errors over pairs of meaning representation and text."""
    return sum((slot_errors(mr, text) for mr, text in zip(mrs, texts, strict=True)), SlotErrors())


def expressed(attribute: str, text: str) -> set[str]:
    """Return the classes of values of an attribute that a text expresses; it is in lower case and without names."""
    found = {value for value in PHRASES[attribute] if _pattern(attribute, value).search(text)}
    if attribute == "familyFriendly" and "no" in found:
        found.discard("yes")
    return found


def _bare(name: str) -> str:
    """Return a name in lower case without a leading "the"."""
    return name.lower().removeprefix("the ")


def _class_of(attribute: str, value: str) -> str:
    """Return the class of a value."""
    plain = re.sub(r"£\s+", "£", value).replace(" - ", "-")
    return CLASSES.get(attribute, {}).get(plain, plain)


@cache
def _pattern(attribute: str, value: str) -> re.Pattern[str]:
    """Return the compiled regular expression of a class."""
    return re.compile(PHRASES[attribute][value])

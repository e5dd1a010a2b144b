"""Frames: what somebody wants of an assistant, as an intent with its slots, written as JSON.

``{"intent": "BookRestaurant", "slots": {"city": "Lyon", "party_size_number": "four"}}``. A slot that is filled more
than once has a list of texts. Such answers are compared as frames: the order of slots, spaces and case do not count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError


@dataclass(frozen=True)
class Frame:
    """An intent and what its slots are filled with."""

    intent: str
    slots: Counter[tuple[str, str]]
    """How often a slot is filled with a text, by name and text in lower case."""

    @staticmethod
    def of(intent: str, filled: Iterable[tuple[str, str]]) -> Frame:
        """Make the frame of an intent, and of the names and texts of its slots."""
        return Frame(intent, Counter((name, _plain(text)) for name, text in filled))

    @staticmethod
    def read(text: str) -> Frame | None:
        """Return the frame that a text writes out; None where it is not one."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # the latter of brackets within brackets without end
            return None
        if not isinstance(found, dict) or set(found) != {"intent", "slots"}:
            return None
        intent, slots = found["intent"], found["slots"]
        if not isinstance(intent, str) or not isinstance(slots, dict):
            return None
        filled = [(name, each) for name, value in slots.items() for each in _texts(value)]
        texts = [(name, each) for name, each in filled if isinstance(each, str)]
        return Frame.of(intent, texts) if len(texts) == len(filled) else None


def write_frame(intent: str, filled: Sequence[tuple[str, str]]) -> str:
    """Return a frame as JSON, its slots in the order in which they are first filled."""
    slots: dict[str, list[str]] = {}
    for name, text in filled:
        slots.setdefault(name, []).append(text)
    values = {name: texts[0] if len(texts) == 1 else texts for name, texts in slots.items()}
    return json.dumps({"intent": intent, "slots": values}, ensure_ascii=False)


def frame_scores(texts: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
    """Compute what is usual for intents and slots (Coucke et al. 2018, arXiv:1805.10190), each a share of 1.

    ``exact_match`` counts frames that are right as a whole, ``intent_accuracy`` their intents, and ``slot_f1`` is the
    harmonic mean of precision and recall over the slots of all texts. A text that is no frame has nothing right.

    Raises:
        ConfigError: a reference is no frame.
    """
    num_exact = num_intents = num_common = num_said = num_wanted = 0
    for text, reference in zip(texts, references, strict=True):
        said, wanted = Frame.read(text), Frame.read(reference)
        if wanted is None:
            raise ConfigError(f"a reference is no frame, which is JSON with intent and slots: {reference}")
        num_wanted += wanted.slots.total()
        if said is not None:
            num_exact += said == wanted
            num_intents += said.intent == wanted.intent
            num_said += said.slots.total()
            num_common += (said.slots & wanted.slots).total()
    num_slots = num_said + num_wanted
    return {
        "exact_match": num_exact / len(texts),
        "intent_accuracy": num_intents / len(texts),
        "slot_f1": 2 * num_common / num_slots if num_slots else 1.0,
    }


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())

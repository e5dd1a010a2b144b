"""Which request an error belongs to, so that it ends that request and no other.

Code that runs for one request only (its prefix, its processors, the drawing of its tokens, its stop rule) runs inside
``blaming``, which says whose error it was. A pass over several sequences can fail without saying so: then it is tried
again in parts (``parts_of``), after everything was set back to where it was before (``Saved``), random numbers
included, so that the sequences which are not at fault get the bits they would have got.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vivace.core.seams import SlotState
from vivace.errors import DecodingError, VivaceError

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Raised to end the program or the loop itself, never a request's fault. Everything else is caught: libraries written
in Rust raise errors that are no ``Exception`` when they panic."""


class RequestFailed(Exception):
    """What belongs to one request failed; ``error`` is what its caller is told."""

    def __init__(self, slot: int, error: VivaceError) -> None:
        super().__init__(f"slot {slot}: {error}")
        self.slot = slot
        self.error = error


@contextmanager
def blaming(slot: int, part: str) -> Iterator[None]:
    """Whatever fails inside belongs to the request in this slot.

    Args:
        slot: of the request.
        part: what runs inside, for the message: "its logits processors".

    Raises:
        RequestFailed: something failed.
    """
    try:
        yield
    except (*STOPS, RequestFailed):
        raise
    except BaseException as cause:
        raise RequestFailed(slot, told(cause, part)) from cause


def told(cause: BaseException, part: str) -> VivaceError:
    """An error as the caller of one request is told it: those of ours as they are, others with where they came from."""
    if isinstance(cause, VivaceError):
        return cause
    what = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
    error = DecodingError(f"decoding failed in {part}: {what}")
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class SavedState:
    """States and random numbers as they are before a pass, to go back to when it fails."""

    states: tuple[tuple[SlotState, object], ...]
    numbers: tuple[tuple[torch.Generator, Tensor], ...]

    @staticmethod
    def of(states: Sequence[SlotState], generators: Sequence[torch.Generator]) -> SavedState:
        """Save what the states remember, and where the generators are."""
        return SavedState(
            tuple((state, state.saved()) for state in states),
            tuple((generator, generator.get_state()) for generator in generators),
        )

    def restore(self) -> None:
        """Set everything back."""
        for state, saved in self.states:
            state.restore(saved)
        for generator, numbers in self.numbers:
            generator.set_state(numbers)


class Stepped(Protocol):
    """A sequence that counts the passes it has come through."""

    num_passes: int


S = TypeVar("S", bound=Stepped)


def parts_of(failed: Sequence[S]) -> list[list[S]]:
    """How sequences are tried again whose pass failed, when nothing says for whom.

    Those that have come through passes before go on together, as it is likely that one of the new ones is at fault,
    which follow one by one. Without new ones, or without others, everyone goes alone.
    """
    known = [sequence for sequence in failed if sequence.num_passes]
    new = [sequence for sequence in failed if not sequence.num_passes]
    if not known or not new:
        return [[sequence] for sequence in failed]
    return [known, *([sequence] for sequence in new)]

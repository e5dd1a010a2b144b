"""Attributes an error to the request that caused it, so that it ends that request and no other.

Code that runs for one request only (its prefix cache, its processors, drawing its tokens, its stop rule) runs inside
``blaming``, which names that request when it fails. A pass over several sequences can fail without naming one. Then
everything is restored to the state before the pass (``SavedState``), random numbers included, and the pass is tried
again in parts (``parts_of``), so that sequences which are not at fault get the bits they would have got.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vivace.core.seams import SlotState
from vivace.errors import DecodingError, VivaceError, WorldError

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit, WorldError)
"""Exceptions that end the program or the loop itself and are never a request's fault; without its other ranks a model
computes nothing any more. All others are caught, also those
that are no ``Exception``: libraries written in Rust raise such errors when they panic."""


class RequestFailed(Exception):
    """Code that belongs to one request failed; ``error`` is what its caller is told."""

    def __init__(self, slot: int, error: VivaceError) -> None:
        super().__init__(f"slot {slot}: {error}")
        self.slot = slot
        self.error = error


@contextmanager
def blaming(slot: int, part: str) -> Iterator[None]:
    """Attribute every error raised inside to the request in this slot.

    Args:
        slot: slot of the request.
        part: what runs inside, for the message, such as "its logits processors".

    Raises:
        RequestFailed: the code inside failed.
    """
    try:
        yield
    except (*STOPS, RequestFailed):
        raise
    except BaseException as cause:
        raise RequestFailed(slot, request_error(cause, part)) from cause


def request_error(cause: BaseException, part: str) -> VivaceError:
    """Return an error as the request's caller sees it: errors of this package unchanged, others with the part that
    failed.
    """
    if isinstance(cause, VivaceError):
        return cause
    what = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
    error = DecodingError(f"decoding failed in {part}: {what}")
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class SavedState:
    """States and random numbers before a pass, to be restored if it fails."""

    states: tuple[tuple[SlotState, object], ...]
    numbers: tuple[tuple[torch.Generator, Tensor], ...]

    @staticmethod
    def of(states: Sequence[SlotState], generators: Sequence[torch.Generator]) -> SavedState:
        """Save these states and the positions of these generators."""
        return SavedState(
            tuple((state, state.saved()) for state in states),
            tuple((generator, generator.get_state()) for generator in generators),
        )

    def restore(self) -> None:
        """Set all states and random generators back to what they were."""
        for state, saved in self.states:
            state.restore(saved)
        for generator, numbers in self.numbers:
            generator.set_state(numbers)


class Stepped(Protocol):
    """A sequence that counts the passes it has taken part in."""

    num_passes: int


S = TypeVar("S", bound=Stepped)


def parts_of(failed: Sequence[S]) -> list[list[S]]:
    """Divide the sequences of a pass that failed into the groups in which it is tried again, when no request is named.

    Sequences that have come through passes before stay together, since one of the new ones is more likely at fault; the
    new ones follow one by one. If all are new, or all are old, each is tried alone.
    """
    known = [sequence for sequence in failed if sequence.num_passes]
    new = [sequence for sequence in failed if not sequence.num_passes]
    if not known or not new:
        return [[sequence] for sequence in failed]
    return [known, *([sequence] for sequence in new)]

"""A snapshot is everything that the next step depends on; it is complete on disk or not there.

A run that was killed and resumed takes the same steps as one that was not: parameters and optimiser come
back as they were, the data continues at its place, and every random draw is seeded by the step's number.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from vivace.errors import CheckpointError, CorruptError, MismatchError
from vivace.files import replacing
from vivace.train.batches import Place

STATE = "state.pt"
_FORMAT = 1


@runtime_checkable
class Stateful(Protocol):
    """An objective that remembers something besides its parameters (moving averages, a generator)."""

    def state(self) -> Mapping[str, Any]:
        """Plain tensors and numbers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take a state over."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    place: Place = field(default_factory=Place)
    elapsed_s: float = 0.0
    num_tokens: int = 0
    """Elements of all batches so far, padding included; files call them tokens whatever they are."""
    best_loss: float | None = None
    best_step: int = 0


def save_snapshot(folder: Path, progress: Progress, optimiser: Mapping[str, Any], objective: object, plan: str) -> None:
    """Write ``state.pt``.

    Args:
        folder: of the run.
        progress: where it stands.
        optimiser: ``Optimiser.state()``, which holds the trained parameters.
        objective: its own state is kept when it is ``Stateful``.
        plan: text that a resumed run must repeat.

    Raises:
        CheckpointError: the disk is full; the snapshot before is as it was.
    """
    kept = dict(objective.state()) if isinstance(objective, Stateful) else None
    content = {
        "format": _FORMAT,
        "plan": plan,
        "progress": asdict(progress),
        "optimiser": optimiser,
        "objective": kept,
        "threads": torch.get_num_threads(),
    }
    write_state(folder / STATE, content)


def load_snapshot(folder: Path, optimiser: Any, objective: object, plan: str) -> Progress | None:
    """Put a run back to its snapshot.

    Args:
        folder: of the run.
        optimiser: an ``Optimiser`` over the same parameters; they are restored through it.
        objective: restored when it is ``Stateful``.
        plan: what this run was asked to do.

    Returns:
        Where it stood, None when there is no snapshot.

    Raises:
        MismatchError: the snapshot belongs to a run with another plan.
        CorruptError: it cannot be read.
    """
    path = folder / STATE
    if not path.exists():
        return None
    content = read_state(path)
    if content["plan"] != plan:
        raise MismatchError(
            f"{path} belongs to a run with another recipe, base or data; continue with those, or start in an empty "
            "folder"
        )
    optimiser.restore(content["optimiser"])
    if isinstance(objective, Stateful) and content["objective"] is not None:
        objective.restore(content["objective"])
    found = dict(content["progress"])
    return Progress(**(found | {"place": Place(**found["place"])}))


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and numbers to a file, whole or not at all; survives a power cut once it returns."""
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"{path} could not be written, and is as it was: {' '.join(str(exc).split())}") from exc


def read_state(path: Path) -> dict[str, Any]:
    """Read what ``write_state`` wrote; never runs code of the file.

    Raises:
        CorruptError: truncated, or written by something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as exc:
        reason = " ".join(str(exc).split())[:200]
        raise CorruptError(f"{path} is truncated or not a training state: {reason}") from exc
    if not isinstance(content, dict) or content.get("format", _FORMAT) != _FORMAT:
        raise CorruptError(f"{path} is not a training state of format {_FORMAT}")
    return content

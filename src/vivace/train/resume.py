"""Snapshots of a training run, which hold everything that the next step depends on.

A snapshot is on disk completely or not at all. A run that was killed and resumed makes the same steps as one that was
not: parameters and optimiser state are restored, the data continues at its place, and every random draw is seeded by
the number of its step.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from vivace.errors import CheckpointError, CorruptError, MismatchError
from vivace.files import replacing
from vivace.train.batches import BatchPlace

STATE = "state.pt"
_FORMAT = 1
_PARTS = ("plan", "progress", "optimiser", "objective")
"""What a snapshot has to hold."""


@runtime_checkable
class HasState(Protocol):
    """An objective that has state besides its parameters, such as moving averages or a generator."""

    def state(self) -> Mapping[str, Any]:
        """Return the state as plain tensors and numbers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state`` returned."""
        ...


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run: its step, place in the data, elapsed time and best loss so far."""

    step: int = 0
    place: BatchPlace = field(default_factory=BatchPlace)
    elapsed_s: float = 0.0
    num_tokens: int = 0
    """Elements of all batches so far, padding included; snapshots use this name for every kind of element."""
    best_loss: float | None = None
    best_step: int = 0


def save_snapshot(
    folder: Path, progress: TrainProgress, optimiser: Mapping[str, Any], objective: object, plan: str
) -> None:
    """Write a snapshot to ``state.pt``.

    Args:
        folder: folder of the run.
        progress: progress of the run.
        optimiser: ``Optimiser.state()``, which holds the trained parameters.
        objective: its own state is saved too if it is ``Stateful``.
        plan: text that a resumed run must have as well.

    Raises:
        CheckpointError: writing failed, for instance because the disk is full; the previous snapshot is unharmed.
    """
    kept = dict(objective.state()) if isinstance(objective, HasState) else None
    content = {
        "format": _FORMAT,
        "plan": plan,
        "progress": asdict(progress),
        "optimiser": optimiser,
        "objective": kept,
        "threads": torch.get_num_threads(),
    }
    write_state(folder / STATE, content)


def load_snapshot(folder: Path, optimiser: Any, objective: object, plan: str) -> TrainProgress | None:
    """Restore a run from its snapshot.

    Args:
        folder: folder of the run.
        optimiser: an ``Optimiser`` over the same parameters, which it restores.
        objective: restored too if it is ``Stateful``.
        plan: text that describes this run; it must be the snapshot's, whose digest of the data may be missing.

    Returns:
        The progress of the run, or None where there is no snapshot.

    Raises:
        MismatchError: the snapshot belongs to a run with another plan.
        CorruptError: the snapshot cannot be read, or is something else.
    """
    path = folder / STATE
    if not path.exists():
        return None
    content = read_state(path)
    if missing := [name for name in _PARTS if name not in content]:
        raise CorruptError(f"{path} is not a training state: it has no {', '.join(missing)}")
    if content["plan"] not in (plan, _before_digests(plan)):
        raise MismatchError(
            f"{path} belongs to a run with another recipe, base or data; continue with those, or start in an empty "
            "folder"
        )
    optimiser.restore(content["optimiser"])
    if isinstance(objective, HasState) and content["objective"] is not None:
        objective.restore(content["objective"])
    found = dict(content["progress"])
    return TrainProgress(**(found | {"place": BatchPlace(**found["place"])}))


def _before_digests(plan: str) -> str:
    """Return a plan as versions wrote it that kept no digest of the data, whose runs go on."""
    try:
        known = json.loads(plan)
    except ValueError:
        return plan
    if not isinstance(known, dict):
        return plan
    return json.dumps({key: value for key, value in known.items() if key != "data"}, sort_keys=True)


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and numbers to a file, completely or not at all; the file is on the disk when this returns."""
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"{path} could not be written, and is as it was: {' '.join(str(exc).split())}") from exc


def read_state(path: Path) -> dict[str, Any]:
    """Read a file that ``write_state`` wrote, without executing any code in it.

    Raises:
        CorruptError: the file is truncated, has other bits than were written, or is no training state.
    """
    try:
        with zipfile.ZipFile(path) as written:  # torch writes checksums and does not read them
            if (damaged := written.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of {damaged} is not that of its bytes")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as exc:  # unpickling takes bytes for instructions, and those of another file fail in any way
        reason = " ".join(str(exc).split())[:200]
        raise CorruptError(f"{path} is truncated or not a training state: {reason}") from exc
    if not isinstance(content, dict) or content.get("format", _FORMAT) != _FORMAT:
        raise CorruptError(f"{path} is not a training state of format {_FORMAT}")
    return content

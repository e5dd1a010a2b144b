"""Seconds of work, by which trainings that take turns are compared."""

from __future__ import annotations

import time

import torch


def work_seconds(device: torch.device) -> float:
    """Return the seconds, from some beginning, that work on a device has taken so far.

    On a CPU they are those that processors spend on this process, whatever else the machine does. On a GPU they are the
    clock's, once the GPU has done all that it was given, since a processor only launches what runs there.
    """
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.monotonic()

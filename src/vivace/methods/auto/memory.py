"""The file in which ``auto`` keeps what it has measured, so that the next run begins where this one ended.

``auto.json`` in the cache folder of the package (``VIVACE_CACHE_DIR``) holds measurements by *place*: processor,
kernels, number of threads and model. Each place has its regimes, each regime its drafters, each drafter the usual sums
of ``measured.py``. The file is rewritten as a whole under a temporary name, while a lock keeps other processes from
writing; they read the old file meanwhile or the new one. Two processes of one place measure the same things, and what
the later one writes replaces what the earlier one wrote. Where a file cannot be understood, everything is measured
anew, with one line that says so. Nothing in it is about texts: it holds times and counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vivace.files import lock, write_text
from vivace.methods.auto.measured import LONGEST, NUM_LINE, Measured, Sums
from vivace.methods.auto.regime import Regime

log = logging.getLogger(__name__)

FILE = "auto.json"
FORMAT = 1
MOST_PLACES = 32
"""Places that the file keeps: those that were written last."""
MOST_DRAFTERS = 32
"""Drafters of a regime that the file keeps, likewise: weights that are trained again are others."""
Regimes = Mapping[Regime, Mapping[str, tuple[Sums, int]]]
"""By regime and drafter: its usual sums, and how many steps are behind them."""


class KeptMeasurements:
    """Reads and writes the measurements of one place."""

    def __init__(self, folder: Path, place: str) -> None:
        """Keep measurements of ``place`` in a file in ``folder``, which need not exist."""
        self.path = folder / FILE
        self.place = place
        self._is_told = False

    def read(self) -> Regimes:
        """Return what earlier runs have measured here; empty where nothing can be read."""
        return self._regimes(self._places())

    def write(self, regimes: Regimes) -> bool:
        """Put measurements in place of those that the file has of these drafters in these regimes.

        Returns:
            Whether there is nothing left to do; False where another process is writing now.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                places = self._places()
                known = _joined(self._regimes(places), regimes)
                places.pop(self.place, None)
                places[self.place] = {regime.key: _written(arms) for regime, arms in known.items()}
                for oldest in list(places)[:-MOST_PLACES]:
                    del places[oldest]
                write_text(self.path, json.dumps({"format": FORMAT, "places": places}) + "\n")
        except BlockingIOError:
            return False
        except OSError as error:
            self._tell(f"measurements of auto are not kept: {error}")
        return True

    def _places(self) -> dict[str, Any]:
        """Return what the file has of every place, the last written at the end."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT or not isinstance(found["places"], dict):
                raise ValueError("it is of another version")
            return dict(found["places"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._tell(f"{self.path} cannot be read ({error}); auto measures anew")
            return {}

    def _regimes(self, places: Mapping[str, Any]) -> dict[Regime, dict[str, tuple[Sums, int]]]:
        try:
            found = places.get(self.place, {})
            return {
                Regime.of_key(key): {name: _read(numbers) for name, numbers in arms.items()}
                for key, arms in found.items()
            }
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            self._tell(f"{self.path} has measurements that make no sense ({error}); auto measures anew")
            return {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the file, which lies beside it since the file itself is replaced.

        Raises:
            BlockingIOError: another process holds it.
        """
        handle = os.open(self.path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if not lock(handle, wait=False):
                raise BlockingIOError
            yield
        finally:
            os.close(handle)

    def _tell(self, line: str) -> None:
        """Say something once."""
        if not self._is_told:
            self._is_told = True
            log.warning("%s", line)


def _joined(old: Regimes, new: Regimes) -> dict[Regime, dict[str, tuple[Sums, int]]]:
    """Return old measurements with new ones in their place; those that are new stand at the end."""
    found = {}
    for regime in {**old, **new}:
        own = new.get(regime, {})
        arms = {**{name: arm for name, arm in old.get(regime, {}).items() if name not in own}, **own}
        found[regime] = dict(list(arms.items())[-MOST_DRAFTERS:])
    return found


def report(memory: KeptMeasurements) -> str:
    """Return in one line what a file says of a place: the fastest drafter of each regime, for users."""
    regimes = memory.read()
    if not regimes:
        return f"nothing measured on this machine yet; it is kept in {memory.path}"
    found = []
    for regime, arms in sorted(regimes.items(), key=lambda pair: (pair[0].is_drawn, pair[0].batch, pair[0].length)):
        rates = {name: Measured(usual=sums, steps=steps).rate for name, (sums, steps) in arms.items()}
        best = max(rates, key=rates.__getitem__)
        plain = f", {rates[best] / rates['plain']:.2f}x plain" if "plain" in rates and best != "plain" else ""
        found.append(f"{regime.label}: {best}{plain}")
    return f"{'; '.join(found)} (in {memory.path})"


def _written(arms: Mapping[str, tuple[Sums, int]]) -> dict[str, list[float]]:
    """Return the measurements of a regime as a file has them: for each drafter its steps and its sums."""
    return {name: [steps, *(float(f"{x:.6g}") for x in sums.numbers)] for name, (sums, steps) in arms.items()}


def _read(numbers: Any) -> tuple[Sums, int]:
    """Return sums and steps from the numbers of a file.

    Raises:
        ValueError: there are too few or too many, or they are no measurements.
    """
    if not isinstance(numbers, list) or len(numbers) != 1 + NUM_LINE + 3 * LONGEST:
        raise ValueError(f"{str(numbers)[:40]!r} are not the numbers of a drafter")
    if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in numbers):
        raise ValueError("not all are numbers of at least 0")
    steps, sums = int(numbers[0]), Sums(np.array(numbers[1:], dtype=np.float64))
    if not sums.weight > 0 or not sums.total_s > 0 or steps < 1:
        raise ValueError("a drafter has no steps")
    return sums, steps

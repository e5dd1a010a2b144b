"""The adapters that requests may name: which are in memory, and which leave when there is no more room.

An adapter is *known* once it has been read and found to fit the model, and *resident* while its factors are in memory.
A running request *pins* its adapter: it stays resident until the request has ended, whatever others ask for. Of those
that nobody runs, the least recently used leave first when their limit is reached.

One that left is read again by a thread of the registry, so that requests that run go on meanwhile; a request waits for
its adapter as it waits for memory.

A request keeps the version it was made with. A name can be given to other files only after it was removed, which is
refused as long as a request runs or waits with it; files that were changed on disk meanwhile are noticed when they are
read again.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf
from pathlib import Path

from torch import Tensor

from vivace.adapters.lora import FactorFile, lora_factors, stamp_of, table_of, version_of
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.peft import ModuleTable
from vivace.core.low_rank import DeltaBank, FixedFactors, LowRankDeltas
from vivace.core.model import Decoder
from vivace.decode.memory import MemoryBudget
from vivace.errors import BusyError, CapacityError, ConfigError, MismatchError, NotFoundError, nearest
from vivace.units import format_bytes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What an adapter may be called."""


class Pin:
    """Fills ``DeltaBank`` for as long as a slot carries the adapter: what keeps the factors in memory."""

    def __init__(self, factors: FixedFactors) -> None:
        self._factors = factors

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call."""
        return self._factors.deltas(which)


@dataclass(eq=False)
class Known:
    """An adapter that was read once and fits the model."""

    name: str
    folder: Path
    version: str
    """Hash of its files."""
    num_bytes: int
    """What it takes in memory."""
    base: str | None
    """Hash of the base as its file has it; None where only names and shapes were compared."""
    stamp: tuple[tuple[int, int, int], ...] | None
    """Size, time and inode of its files when their hash was taken."""
    file: FactorFile | None
    """From which its factors are read again; None where they are read as they were at first."""
    factors: FixedFactors | None = None
    """None while it is not resident."""
    loading: Future[FixedFactors] | None = None
    """Its factors while they are read; they take their room already."""
    pin: weakref.ref[Pin] | None = None
    sources: weakref.WeakSet[Source] = field(default_factory=weakref.WeakSet)
    """What requests have that name it."""

    @property
    def is_pinned(self) -> bool:
        """Return whether a running request carries it."""
        return self.pin is not None and self.pin() is not None

    @property
    def awaited_since(self) -> float:
        """Return the number of the first request that waits and will carry it; infinity for none."""
        return min((source.turn for source in self.sources if not source.has_run), default=inf)

    @property
    def is_awaited(self) -> bool:
        """Return whether a request waits that will carry it."""
        return self.awaited_since < inf

    @property
    def is_used(self) -> bool:
        """Return whether a request runs or waits with it."""
        return self.is_pinned or self.is_awaited

    @property
    def is_held(self) -> bool:
        """Return whether it takes room in memory."""
        return self.factors is not None or self.loading is not None


_TURNS = count()


class Source:
    """Implements ``AdapterSource``: the adapter of one request, brought into memory before the request runs."""

    number = 0

    def __init__(self, registry: Registry, known: Known) -> None:
        """Name an adapter of a registry."""
        self._registry = registry
        self._known = known
        self.turn = next(_TURNS)
        """Number of the request; earlier ones have lower numbers."""
        self.has_run = False
        """Whether the request has been given a slot since it waited last."""
        known.sources.add(self)

    def wait(self) -> None:
        """Note that the request has no slot, from the start or once more, and will need the adapter."""
        self.has_run = False

    @property
    def version(self) -> str:
        """Return the hash of the adapter's files."""
        return self._known.version

    @property
    def bank(self) -> DeltaBank:
        """Return the factors, which stay in memory as long as the caller has them.

        Raises:
            BusyError: those of running requests leave no room for them.
            CheckpointError: the files were changed or removed.
        """
        pin = self._registry.pinned(self._known)
        self.has_run = True
        return pin

    def is_ready(self) -> bool:
        """Return whether it is in memory, or could be brought there now."""
        return self._registry.can_bring(self._known)


class Registry:
    """The adapters of one model by name."""

    def __init__(self, model: Decoder, base: Path | None, memory: MemoryBudget, max_bytes: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            model: whose rows carry them.
            base: its checkpoint; None for a model that exists only in memory, which takes none.
            memory: limit that counts them too.
            max_bytes: most that those in memory may take together; None sets no limit of their own.
        """
        self._model = model
        self._base = base
        self._memory = memory
        self.max_bytes = max_bytes
        self.num_loads = 0
        """How often factors were brought into memory."""
        self.num_evicted = 0
        """How often they left to make room."""
        self.default: str | None = None
        """Name of the one that calls wear which name none; None lets them wear none."""
        self._known: OrderedDict[str, Known] = OrderedDict()
        """The least recently used first."""
        self._lock = threading.RLock()
        self._reader = ThreadPoolExecutor(1, "vivace-adapters")

    def __contains__(self, name: object) -> bool:
        return name in self._known

    @property
    def names(self) -> list[str]:
        """Return the names that requests may give, in order."""
        with self._lock:
            return sorted(self._known)

    @property
    def resident(self) -> list[str]:
        """Return the names of those in memory, the least recently used first."""
        with self._lock:
            return [known.name for known in self._known.values() if known.factors is not None]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of those in memory."""
        with self._lock:
            return sum(known.num_bytes for known in self._held())

    @cached_property
    def _table(self) -> ModuleTable:
        assert self._base is not None
        return table_of(self._base, self._model)

    @cached_property
    def _hash(self) -> str:
        assert self._base is not None
        return base_hash(self._base)

    def limit(self, max_bytes: int | None) -> None:
        """Set the most that adapters in memory may take together; those that no request runs leave at once.

        Raises:
            CapacityError: one of them is larger.
        """
        with self._lock:
            self.max_bytes = max_bytes
            for known in self._known.values():
                self._require_fits(known)
            self._evict_for(0)

    def add(self, name: str, folder: str | Path) -> Known:
        """Read an adapter and let requests name it.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            folder: as PEFT writes it.

        Raises:
            ConfigError: the name cannot be one, or is taken.
            CapacityError: it is larger than all adapters together may be.
            BusyError: those of running requests leave no room for it.
            CheckpointError: it is missing, broken or of another base.
            UnsupportedError: it is more than a LoRA, or the model takes none.
        """
        check_name(name)
        place = Path(folder)
        if self._base is None:
            raise NotFoundError("adapters can only be checked against a checkpoint folder, and this model has none")
        self._require_free(name)
        stamp = stamp_of(place)
        factors, base, file = lora_factors(place, self._table, self._model, self._hash)
        known = Known(name, place, version_of(place), self._laid_out(factors), base, stamp, file)
        with self._lock:
            self._require_free(name)  # another thread may have taken it while the files were read
            self._make_room(known)
            self._hold(known, factors)
            self._known[name] = known
        return known

    def _require_free(self, name: str) -> None:
        with self._lock:
            if name in self._known:
                raise ConfigError(f"the name {name!r} is taken by {self._known[name].folder}; give another name")

    def remove(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            NotFoundError: there is none of this name.
            BusyError: a request runs or waits with it, or all wear it that name none.
        """
        with self._lock:
            known = self.find(name)
            if name == self.default:
                raise BusyError(f"adapter {name!r} is worn by all requests that name none, so it cannot be unloaded")
            if known.is_used:
                gc.collect()  # a request that ended may still be part of a cycle
            if known.is_used:
                raise BusyError(f"adapter {name!r} is in use; unload it when its requests have ended")
            del self._known[name]
            known.factors = None

    def find(self, name: str) -> Known:
        """Return what is known of an adapter.

        Raises:
            NotFoundError: there is none of this name.
        """
        with self._lock:
            if name not in self._known:
                hint = nearest(name, self._known) if self._known else "; none was loaded"
                raise NotFoundError(f"there is no adapter {name[:100]!r}{hint}")
            return self._known[name]

    def source(self, name: str) -> Source:
        """Return what a request carries that names an adapter.

        Raises:
            NotFoundError: there is none of this name.
        """
        with self._lock:
            return Source(self, self.find(name))

    def worn(self, name: str | None) -> Source | None:
        """Return what a request carries that names an adapter or none: by default ``default``, if there is such.

        Raises:
            NotFoundError: there is none of this name.
        """
        chosen = self.default if name is None else name
        return None if chosen is None else self.source(chosen)

    def can_bring(self, known: Known) -> bool:
        """Return whether an adapter is in memory; if it is not, begin to read it where running requests leave room.

        What cannot be read is said to be there: whoever takes it is told why.
        """
        with self._lock:
            try:
                future = self._begun(known)
                if future is not None and not future.done():
                    return False
                self._settle(known)
            except BusyError:
                return False
            except Exception:  # noqa: BLE001 - of any kind: it is for the request that takes the adapter, not for all
                return True
            return True

    def pinned(self, known: Known) -> Pin:
        """Return what keeps an adapter in memory, one object for all slots that carry it; wait for what is read.

        Raises:
            BusyError: the adapters of running requests leave no room.
            CheckpointError: its files were changed or removed since it was read.
        """
        while True:
            with self._lock:
                try:
                    future = self._begun(known, takes_all=True)
                except BusyError:
                    future = next((other.loading for other in self._held() if other.loading is not None), None)
                    if future is None:
                        raise
                else:
                    if future is None or future.done():
                        return self._pin(known, self._settle(known))
            wait([future])
            self._settle_others(known)

    def _settle_others(self, known: Known) -> None:
        """Take into memory what was read meanwhile for other requests, which may leave again."""
        with self._lock:
            for other in self._held():
                if other is not known and other.loading is not None and other.loading.done():
                    with suppress(Exception):  # of any kind: whoever takes it is told why
                        self._settle(other)

    def _pin(self, known: Known, factors: FixedFactors) -> Pin:
        pin = None if known.pin is None else known.pin()
        if pin is None:
            pin = Pin(factors)
            known.pin = weakref.ref(pin)
        return pin

    def _begun(self, known: Known, *, takes_all: bool = False) -> Future[FixedFactors] | None:
        """Return the reading of an adapter that is not in memory, begun now if it was not; None for one that is.

        Args:
            known: the adapter.
            takes_all: whether it may take the room of adapters that earlier requests wait for.

        Raises:
            BusyError: the adapters of running requests leave no room.
        """
        if known.name in self._known:
            self._known.move_to_end(known.name)
        if known.factors is None and known.loading is None:
            self._make_room(known, inf if takes_all else known.awaited_since)
            known.loading = self._reader.submit(self._read, known)
        return known.loading

    def _settle(self, known: Known) -> FixedFactors:
        """Take what was read into memory; return the factors.

        Raises:
            BusyError: texts have the memory that they take.
            CheckpointError: they could not be read.
        """
        future, known.loading = known.loading, None
        if known.factors is None:
            assert future is not None
            self._hold(known, future.result())
        assert known.factors is not None
        return known.factors

    def _read(self, known: Known) -> FixedFactors:
        """Read the factors of an adapter again, and lay them out; files are hashed only if their stamps differ."""
        if stamp_of(known.folder) != known.stamp and version_of(known.folder) != known.version:
            raise MismatchError(f"{known.folder} was changed while it was in use; unload it and load it again")
        if known.file is None:
            factors = lora_factors(known.folder, self._table, self._model, self._hash, is_known=True).factors
        else:
            factors = known.file.read()
        self._laid_out(factors)
        return factors

    def _hold(self, known: Known, factors: FixedFactors) -> None:
        self._memory.hold(factors, known.num_bytes, f"adapter {known.name}")
        known.factors = factors
        self.num_loads += 1

    def _held(self) -> list[Known]:
        return [known for known in self._known.values() if known.is_held]

    def _laid_out(self, factors: FixedFactors) -> int:
        """Lay factors out for the model's kernels; return their bytes in both forms."""
        return factors.nbytes + self._model.backend.lay_out(factors)

    def _make_room(self, known: Known, turn: float = inf) -> None:
        """Let adapters leave until another fits.

        Args:
            known: the other.
            turn: adapters that requests before this one wait for stay; infinity lets all leave.

        Raises:
            CapacityError: it never can.
            BusyError: those that stay are carried by running requests.
        """
        self._require_fits(known)
        self._evict_for(known.num_bytes, turn)
        if self.max_bytes is not None and self.num_bytes + known.num_bytes > self.max_bytes:
            raise BusyError(
                f"adapter {known.name!r} takes {format_bytes(known.num_bytes)}, and running requests carry "
                f"{format_bytes(self.num_bytes)} of {format_bytes(self.max_bytes)}; ask again when they have ended"
            )

    def _require_fits(self, known: Known) -> None:
        """Refuse an adapter that is larger than all together may be."""
        if self.max_bytes is not None and known.num_bytes > self.max_bytes:
            raise CapacityError(
                f"adapter {known.name!r} takes {format_bytes(known.num_bytes)}, more than the "
                f"{format_bytes(self.max_bytes)} for all adapters; give more memory, or one of a lower rank"
            )

    def _evict_for(self, num_bytes: int, turn: float = inf) -> None:
        """Let adapters that no request runs leave until so many bytes are free: first those that none waits for, then
        those for which the latest wait, and no one that a request before ``turn`` waits for unless that is infinity.
        """
        free = [other for other in self._held() if other.factors is not None and not other.is_pinned]
        free = [other for other in free if turn == inf or other.awaited_since > turn]
        for other in sorted(free, key=lambda other: -other.awaited_since):
            if self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes:
                other.factors = None
                self.num_evicted += 1


def check_name(name: str) -> None:
    """Refuse what cannot be the name of an adapter.

    Raises:
        ConfigError: it is empty, too long, or has other characters than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:100]!r} cannot name an adapter; use letters, digits, '.', '_' and '-', 100 at most, a letter or "
            "digit first"
        )

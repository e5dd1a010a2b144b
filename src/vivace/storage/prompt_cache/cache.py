"""Prompts and answers on disk: found again by any later process, with the bits that reading them would give.

``PromptCache`` stands behind the cache in memory (``decode/prefix.py``), with the same keys, stretches and rules: what
the memory does not have is taken from disk, and what was read or written goes to both. A text waits for the disk only
when it takes something from there. Its blocks are held until a thread of this cache has written them.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.checkpoint.adapters import STORE, base_hash
from vivace.core.blocks import BlockPool
from vivace.core.cache import Blocks, KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Prefix
from vivace.decode.prefix import PrefixCache
from vivace.errors import BusyError
from vivace.kernels.build import fingerprint
from vivace.storage.prompt_cache.block_file import BlockHeader, bytes_of, checksum_of
from vivace.storage.prompt_cache.directory import BlockDirectory, StoredBlock, checked_limit, name_of
from vivace.units import format_bytes

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Size of a folder where none is given."""


class Stretch(NamedTuple):
    """A part of a text that a block has."""

    start: int
    stop: int
    """One past its last token that is wanted; the block may have more."""
    block: StoredBlock


@dataclass(frozen=True)
class _Unwritten:
    """A stretch whose blocks are held until it is written."""

    above: str
    first: int
    tokens: tuple[int, ...]
    blocks: Blocks
    hidden: Tensor


def facts_of(model: Decoder, folder: Path, weights: str) -> dict[str, str]:
    """Return what entries depend on besides their text: the model, its numbers, and what computes them.

    Args:
        model: the decoder.
        folder: its checkpoint or store.
        weights: format of its matrices.
    """
    body = getattr(model.backend, "body", None)
    if body is None:
        capability = torch.backends.cpu.get_cpu_capability() if model.device.type == "cpu" else str(model.device)
        backend = f"torch {torch.__version__} {capability} {torch.get_num_threads()} threads"
    else:
        backend = f"{body.name} {fingerprint()}"
    store = folder / STORE
    shared = PrefixCache.of(model, 0)
    return {
        "base": base_hash(folder),
        "store": sha256(store.read_bytes()).hexdigest() if store.is_file() else "none",
        "shape": sha256(repr(model.config).encode()).hexdigest()[:16],
        "rope": "; ".join(map(repr, model.config.ropes)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights,
        "kv": "int8" if any(spec.is_int8 for spec in model.blocks.specs) else "same",
        "backend": f"{backend}, {platform.machine()}, {sys.byteorder} endian",
        "block": f"{shared.chunk} tokens",
    }


class PromptCache:
    """Stretches of texts in a folder; it is told of texts in the thread that decodes, and writes them in its own."""

    def __init__(
        self,
        model: Decoder,
        path: Path,
        facts: Mapping[str, str],
        *,
        max_bytes: int = MAX_BYTES,
        is_read_only: bool = False,
    ) -> None:
        """Open a folder, or make it.

        Args:
            model: the decoder.
            path: the folder.
            facts: what entries depend on besides their text (``facts_of``).
            max_bytes: of the folder.
            is_read_only: whether nothing is ever added.

        Raises:
            ConfigError: the folder cannot be made, or the limit has no room for a block.
            NotFoundError: it is only to be read, and not there.
        """
        self._rules = PrefixCache.of(model, 0)
        entry_bytes = sum(spec.entry_bytes(model.dtype) for spec in model.blocks.specs)
        width = model.config.width * model.dtype.itemsize
        checked_limit(max_bytes, self._rules.chunk * (entry_bytes + width))
        self._root = sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()
        self._ropes = model.config.ropes
        self.directory = BlockDirectory(path, facts, max_bytes=max_bytes, is_read_only=is_read_only)
        self.num_hits = 0
        """Prompt tokens that were taken from disk."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prompt-cache")
        self._pending: set[Future[None]] = set()
        self._held: Counter[tuple[BlockPool, int]] = Counter()
        self._lock = threading.RLock()
        self._has_told_limit = self._has_told_pruned = False

    def tell_pruned(self, prefill: str) -> None:
        """Say once that prompts which are read so have no use of the cache."""
        if not self._has_told_pruned:
            log.warning("prefill %s prunes prompts, which the prompt cache neither keeps nor gives", prefill)
        self._has_told_pruned = True

    def behind(self, memory: Prefix | None, salt: str | None = None, owner: bytes = b"") -> CachedOnDisk:
        """Return what requests of an owner with a salt see of the disk, behind what they see of the memory."""
        return CachedOnDisk(self, memory, owner, salt or "")

    @property
    def keeps_answers(self) -> bool:
        """Return whether an answer has the bits of a prompt."""
        return self._rules.keeps_answers

    # Finding

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache, owner: bytes, salt: str) -> list[Tensor] | None:
        """Store what is on disk of a text behind what a slot has; return its residuals, (n, E) of each stretch.

        Returns:
            None where a block was damaged, which is not used again; then the slot is empty.

        Raises:
            BusyError: there is no memory now; then the slot is empty.
        """
        known = cache.lengths[slot]
        found = self.find(tokens, self.root(slot, cache, owner, salt))
        while found and not _is_complete(found, known, cache):
            found.pop()
        wanted = [stretch for stretch in found if stretch.stop > known]
        hidden = []
        for place, stretch in enumerate(wanted):
            content = self.directory.read(stretch.block)
            try:
                if content is None:
                    for behind in wanted[place + 1 :]:  # those that are damaged too are written anew at once
                        self.directory.read(behind.block, tells=False)
                    cache.clear(slot)
                    return None
                hidden.append(self._put(stretch, content, slot, cache))
            except BusyError:
                cache.clear(slot)
                raise
        self.directory.touch([stretch.block for stretch in found])
        self.num_hits += sum(map(len, hidden))
        return hidden

    def find(self, tokens: Sequence[int], above: str) -> list[Stretch]:
        """Return the stretches that a text has in common with blocks, from its beginning on."""
        found = []
        for start in range(0, len(tokens), self._rules.chunk):
            key = array("q", tokens[start : start + self._rules.chunk]).tobytes()
            block, common = self.directory.find(above, key), len(key) // 8
            if block is None:
                block, common = self._nearest(above, key)
            if block is None:
                break
            found.append(Stretch(start, start + common, block))
            if common < len(key) // 8 or common < len(block.header.tokens):
                break
            above = block.name
        return found

    def _nearest(self, above: str, key: bytes) -> tuple[StoredBlock | None, int]:
        """Return the block that has most first tokens in common with a stretch, and how many these are."""
        best, most = None, 0
        if self._rules.by_row:
            for block in self.directory.beside(above):
                common = _common(block.header.key, key)
                if common > most:
                    best, most = block, common
        return best, most

    def _put(self, stretch: Stretch, content: bytearray, slot: int, cache: KVCache) -> Tensor:
        """Store the part of a block that a slot has not; return its residuals."""
        header, first = stretch.block.header, cache.lengths[slot]
        count, at = len(header.tokens), 0

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal at
            size = prod(shape)
            begin, at = at, at + size * dtype.itemsize
            return (
                torch.frombuffer(content, dtype=dtype, count=size, offset=begin).view(shape)
                if size
                else (torch.empty(shape, dtype=dtype))
            )

        hidden = take((count, header.hidden_width), header.dtype)
        parts = []
        for table, start in zip(cache.tables, header.starts, strict=True):
            stored = [take(shape, dtype) for shape, dtype in table.pool.shapes(header.first + count - start)]
            kept = slice(max(0, first - start), max(0, stretch.stop - start))
            parts.append([part[..., kept, :] for part in stored])
        cache.fill(slot, first, stretch.stop, parts)
        return hidden[first - stretch.start : stretch.stop - stretch.start].to(cache.device)

    # Keeping

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor, owner: bytes, salt: str) -> None:
        """Have the stretches of a text written that are not there yet; ``hidden`` (tokens, E) is the text's."""
        if self.directory.is_read_only:
            return
        above, lacks = self.root(slot, cache, owner, salt), []
        present: list[StoredBlock] = []
        for start in range(0, len(tokens), self._rules.chunk):
            part = tuple(tokens[start : start + self._rules.chunk])
            key = array("q", part).tobytes()
            found = self.directory.find(above, key)
            if found is None:
                stop = start + len(part)
                lacks.append(_Unwritten(above, start, part, cache.lend(slot, start, stop), hidden[start:stop]))
            else:
                present.append(found)
            above = name_of(above, key)
        if not lacks:
            self.directory.touch(present)
            return
        pools = [table.pool for table in cache.tables]
        with self._lock:
            self._held.update(each for job in lacks for each in _numbered(pools, job.blocks))
            future = self._writer.submit(self._write, lacks, present, pools)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def flush(self) -> None:
        """Wait until everything is written."""
        for future in list(self._pending):
            future.exception()

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes of blocks that nobody else holds, which are free once they are written."""
        with self._lock:
            return sum(pool.block_bytes for (pool, block), n in self._held.items() if pool.num_holders(block) == n)

    def evict(self, num_bytes: int) -> int:
        """Give back what can be given back, by writing it; return how many bytes these are."""
        freed = self.evictable_bytes
        self.flush()
        return freed

    def _write(self, jobs: Sequence[_Unwritten], present: Sequence[StoredBlock], pools: Sequence[BlockPool]) -> None:
        """Write the stretches of a text, in the thread for that."""
        waiting, chain = list(jobs), list(present)
        try:
            with self.directory.writing():
                self.directory.touch(present)
                while waiting:
                    block = self._write_one(waiting[0], pools, {block.name for block in chain})
                    if block is None:
                        self._tell_limit(waiting[0].first)
                        break
                    chain.append(block)
                    if self._rules.by_row:
                        self.directory.remove_part(block)
                    self._let_go(waiting.pop(0), pools)
                self.directory.touch(chain)
        except OSError as error:
            self.directory.tell(error)
        finally:
            for job in waiting:
                self._let_go(job, pools)

    def _write_one(self, job: _Unwritten, pools: Sequence[BlockPool], protected: set[str]) -> StoredBlock | None:
        key = array("q", job.tokens).tobytes()
        present = self.directory.find(job.above, key)  # another process has written it meanwhile
        if present is not None:
            return present
        stop, starts, parts = job.first + len(job.tokens), [], [job.hidden]
        for pool, blocks in zip(pools, job.blocks, strict=True):
            base = job.first // pool.size * pool.size
            passed = next((place for place, block in enumerate(blocks) if block), len(blocks))
            start = min(stop, max(job.first, base + passed * pool.size))
            starts.append(start)
            parts += pool.copies(blocks, start - base, stop - base)
        views = bytes_of(parts)
        header = BlockHeader(
            self.directory.model,
            job.above,
            job.first,
            job.tokens,
            tuple(starts),
            str(job.hidden.dtype).removeprefix("torch."),
            job.hidden.shape[1],
            sum(view.nbytes for view in views),
            checksum_of(views),
        )
        return self.directory.add(header, views, protected)

    def _let_go(self, job: _Unwritten, pools: Sequence[BlockPool]) -> None:
        with self._lock:
            self._held -= Counter(_numbered(pools, job.blocks))
            for pool, blocks in zip(pools, job.blocks, strict=True):
                pool.give_back(blocks)

    def _tell_limit(self, num_tokens: int) -> None:
        if not self._has_told_limit:
            limit = format_bytes(self.directory.max_bytes)
            log.warning(
                "prompt cache %s: %s hold %d tokens of a text and no more", self.directory.path, limit, num_tokens
            )
        self._has_told_limit = True

    def root(self, slot: int, cache: KVCache, owner: bytes, salt: str) -> str:
        """Return what the first stretch of a request's text is behind."""
        lengths = [rope.length_class(cache.prompts[slot]) for rope in self._ropes]
        adapter = cache.adapters.version(slot)
        shared = json.dumps([owner.hex(), salt, lengths, cache.row_count, *([adapter] if adapter else ())])
        return sha256(self._root + shared.encode()).hexdigest()


@dataclass(frozen=True)
class CachedOnDisk:
    """Fills ``Prefix`` for requests of one owner and salt: what is in memory, and behind it what is on disk."""

    disk: PromptCache
    memory: Prefix | None
    owner: bytes
    salt: str

    @property
    def keeps_answers(self) -> bool:
        """Return whether an answer has the bits of a prompt."""
        return self.disk.keeps_answers

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> list[Tensor]:
        """See ``Prefix``."""
        while True:
            hidden = [] if self.memory is None else list(self.memory.attach(tokens, slot, cache))
            try:
                further = self.disk.attach(tokens, slot, cache, self.owner, self.salt)
            except BusyError:
                return [] if self.memory is None else list(self.memory.attach(tokens, slot, cache))
            if further is not None:
                return [*hidden, *further]

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        """See ``Prefix``."""
        if self.memory is not None:
            self.memory.keep(tokens, slot, cache, hidden)
        self.disk.keep(tokens, slot, cache, hidden, self.owner, self.salt)


def _is_complete(found: Sequence[Stretch], known: int, cache: KVCache) -> bool:
    """Return whether all entries are there that rows behind these stretches read: windows may have passed some."""
    length = found[-1].stop
    for pool, table in enumerate(cache.tables):
        window = table.pool.window
        for stretch in found if window is not None else ():
            needed = max(stretch.start, known, length - (window or 0))
            if needed < min(stretch.block.header.starts[pool], stretch.stop):
                return False
    return True


def _numbered(pools: Sequence[BlockPool], blocks: Blocks) -> list[tuple[BlockPool, int]]:
    """Return each block with its pool; places that a window has passed are left out."""
    return [(pool, block) for pool, own in zip(pools, blocks, strict=True) for block in own if block]


def _common(one: bytes, other: bytes) -> int:
    """Return how many first tokens two stretches have in common."""
    count = 0
    for place in range(0, min(len(one), len(other)), 8):
        if one[place : place + 8] != other[place : place + 8]:
            break
        count += 1
    return count

"""Entries of texts that were read or written before, so that a shared beginning is read once.

What is kept are the blocks themselves in which a text was stored (``core/blocks.py``): a text that begins like an
earlier one has the earlier one's blocks in its table, and nothing is copied. Blocks that only this cache holds are
given back when memory is needed, the least recently used first.

Only bits that reading the prompt would write are reused. Where prompts are read row by row (native kernels), a row's
bits depend on nothing but the text before it, however the prompt is divided and whether the token was read or decoded.
There any common beginning is shared, down to a token, and what an answer wrote is kept as well: the next turn of a
chat reads only what is new. Elsewhere a prompt goes up in chunks at fixed places, whose bits are not those of single
rows; there whole chunks are shared, and the last, shorter chunk of a prompt that is repeated as a whole.

With the entries of a token its residual at the top is kept, one row of the model's width, because some drafters begin
from it (EAGLE from those of the whole prompt). An answer, and what is guessed for it, is therefore the same with and
without this cache, whichever method sent the prompt before.

Stretches of texts form a tree: a stretch is found by its tokens and by the stretch before it, the first one by whose
request it was. Keys are compared in full, never by a digest alone, so no choice of salt or tokens leads to the entries
of another text.

An engine has one cache for all its calls (``vivace.load(..., prefix_cache="256MiB")``), and so has a server, whose
requests see the part of their own API key and salt.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch import Tensor

from vivace.core.blocks import Account, BlockStore
from vivace.core.cache import Blocks, KVCache
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.errors import BusyError

CHUNK = 256
"""Prompt tokens that go up together where a session is not told otherwise."""
STRETCH = 64
"""Tokens of a stretch where any common beginning may be shared."""


class Root(NamedTuple):
    """What requests have to agree on before they share anything."""

    owner: bytes
    """Stands for the API key of the request; empty in Python, and where a server asks for none."""
    salt: str
    """The request's own ``cache_salt``; empty for none."""
    rotated_length: tuple[int, ...]
    """Class of the whole prompt's length in each rotary embedding that depends on it, else 0."""
    row_count: int
    """What the rows of a call were padded to: in ``exact`` mode bits may be others."""
    adapter: str
    """Version of the adapter that the rows carry, and of the soft prompt in front of the text; empty for neither."""


class Place(NamedTuple):
    """Where a stretch stands: its tokens, and everything before them."""

    above: Root | int
    """Number of the stretch before it, or the root."""
    tokens: bytes
    """Its tokens, eight bytes each."""


@dataclass(frozen=True)
class Piece:
    """What is kept of a stretch: the blocks it is stored in, and its residuals at the top (tokens, E)."""

    number: int
    """Names this stretch in the places of those that follow it; never used again."""
    blocks: Blocks
    hidden: Tensor
    account: Account
    """Whose memory the residuals are taken from."""


class PrefixCache:
    """Stretches of texts by what was written up to their end; the least recently used leave first."""

    def __init__(self, config: ModelConfig, *, max_bytes: int, chunk: int = CHUNK, by_row: bool = False) -> None:
        """Hold nothing yet.

        Args:
            config: of the model.
            max_bytes: memory that may be used.
            chunk: tokens of a stretch, which must be those of the session's chunks unless ``by_row``.
            by_row: whether prompts are read row by row, so that any common beginning may be shared.
        """
        self.chunk = chunk
        self.by_row = by_row
        self.keeps_answers = by_row and not any(rope.kind == "dynamic" for rope in config.ropes)
        """Whether what decoding writes has the bits of a prompt: not where a prompt is rotated by its whole length."""
        self.max_bytes = max_bytes
        self.num_queries = 0
        """Prompt tokens asked for so far."""
        self.num_hits = 0
        """Prompt tokens that were there."""
        self.num_evicted = 0
        """Stretches that made room for others, or for texts."""
        # where a prompt is rotated as a text of its whole length, only prompts of one length class share entries
        self._ropes = config.ropes
        self._pieces: OrderedDict[Place, Piece] = OrderedDict()
        self._beside: dict[tuple[Root | int, int], list[Place]] = {}
        """Places by what is above them and their first token."""
        self._held: Counter[tuple[int, int]] = Counter()
        """How many stretches hold each block (pool, number)."""
        self._children: Counter[int] = Counter()
        """How many stretches follow each, by its number."""
        self._hidden_bytes = 0
        self._store: BlockStore | None = None
        self._numbers = count()
        self._lock = threading.RLock()

    @staticmethod
    def of(model: Decoder, max_bytes: int) -> PrefixCache:
        """Make the cache of a model's texts, which shares as much as the way its prompts are read allows."""
        by_row = model.backend.rows_up_to == sys.maxsize
        return PrefixCache(model.config, max_bytes=max_bytes, chunk=STRETCH if by_row else CHUNK, by_row=by_row)

    def __len__(self) -> int:
        return len(self._pieces)

    def __del__(self) -> None:
        """Give all blocks back."""
        while getattr(self, "_pieces", None):
            self._drop_oldest()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the blocks and residuals that are kept."""
        with self._lock:
            return self._hidden_bytes + sum(self._block_bytes(pool) for pool, _ in self._held)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that are kept."""
        return len(self._held)

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes of the blocks that nobody else holds, and of residuals."""
        with self._lock:
            alone = (pool for (pool, block), held in self._held.items() if self._holders(pool, block) == held)
            return self._hidden_bytes + sum(map(self._block_bytes, alone))

    def _holders(self, pool: int, block: int) -> int:
        assert self._store is not None
        return self._store.pools[pool].num_holders(block)

    def _block_bytes(self, pool: int) -> int:
        assert self._store is not None
        return self._store.pools[pool].block_bytes

    def salted(self, salt: str | None = None, owner: bytes = b"") -> Salted:
        """Return the part of the cache that requests of this owner with this salt see."""
        return Salted(self, owner, salt or "")

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache, owner: bytes, salt: str) -> list[Tensor]:
        """Give an empty slot the blocks of known stretches; return the residuals (n, E) of each of them."""
        with self._lock:
            self.num_queries += len(tokens)
            if self._store is not cache.store:
                return []
            found = self._found(tokens, self._root(slot, cache, owner, salt))
            while found and not self._is_complete(found, cache):
                found.pop()
            hidden = []
            for start, known, place in found:
                piece = self._pieces[place]
                cache.adopt(slot, start, known, piece.blocks)
                hidden.append(piece.hidden[: known - start])
            if found:
                cache.commit([slot], [range(found[-1][1])])
                self.num_hits += found[-1][1]
            self._touch([place for _, _, place in found])
            return hidden

    def _found(self, tokens: Sequence[int], root: Root) -> list[tuple[int, int, Place]]:
        """Return the stretches that a text has in common with others: where each begins and ends, and its place."""
        above: Root | int = root
        found = []
        for start, stop in self._spans(tokens):
            place, common = _place(above, tokens[start:stop]), stop - start
            if place not in self._pieces:
                place, common = self._nearest(place)
            if common:
                found.append((start, start + common, place))
            if start + common < stop or common < len(self._pieces[place].hidden):
                break
            above = self._pieces[place].number
        return found

    def _is_complete(self, found: Sequence[tuple[int, int, Place]], cache: KVCache) -> bool:
        """Return whether all entries are there that rows behind these stretches read: windows may have passed some."""
        length = found[-1][1]
        for pool, table in enumerate(cache.tables):
            window = table.pool.window
            for start, stop, place in found if window is not None else ():
                first = start // cache.store.size
                for at, block in enumerate(self._pieces[place].blocks[pool], first):
                    end = min((at + 1) * cache.store.size, stop)
                    if not block and end > length - (window or 0):
                        return False
        return True

    def _nearest(self, wanted: Place) -> tuple[Place, int]:
        """Return the stretch that has most first tokens in common with this one, and how many these are."""
        best, most = wanted, 0
        if self.by_row:
            asked = wanted.tokens
            for place in self._beside.get((wanted.above, _first(asked)), ()):
                common = _common(place.tokens, asked)
                if common > most:
                    best, most = place, common
        return best, most

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor, owner: bytes, salt: str) -> None:
        """Hold the blocks of stretches that are not there yet; ``hidden`` (tokens, E) is the text's.

        The least recently used leave where this is more than the cache may have. What there is no memory for is not
        kept.
        """
        with self._lock:
            if self._store is not cache.store:
                self._forget_all()
                self._store = cache.store
            above: Root | int = self._root(slot, cache, owner, salt)
            kept: list[Place] = []
            for start, stop in self._spans(tokens):
                place = _place(above, tokens[start:stop])
                if place not in self._pieces:
                    rows = hidden[start:stop].clone()
                    self._touch(kept)  # what may be evicted for this is of other texts
                    try:
                        cache.account.take(rows.nbytes)
                    except BusyError:
                        break
                    self._add(place, Piece(next(self._numbers), cache.lend(slot, start, stop), rows, cache.account))
                    if kept and kept[-1] not in self._pieces:
                        break
                above = self._pieces[place].number
                kept.append(place)
            self._touch(kept)
            while self._pieces and self.nbytes > self.max_bytes:
                self._drop_oldest()

    def _add(self, place: Place, piece: Piece) -> None:
        beside = list(self._beside.get((place.above, _first(place.tokens)), ())) if self.by_row else []
        for other in beside:  # a shorter one that nothing follows is part of this one
            if place.tokens.startswith(other.tokens) and not self._children[self._pieces[other].number]:
                self._drop(other)
        self._beside.setdefault((place.above, _first(place.tokens)), []).append(place)
        self._pieces[place] = piece
        if isinstance(place.above, int):
            self._children[place.above] += 1
        self._hidden_bytes += piece.hidden.nbytes
        for pool, blocks in enumerate(piece.blocks):
            self._held.update((pool, block) for block in blocks if block)

    def evict(self, num_bytes: int) -> int:
        """Give back at least so many bytes, the least recently used first, if there are as many; returns how many."""
        with self._lock:
            freed = 0
            for takes_used in (False, True):  # of those in use only residuals are free, and blocks need no copy then
                for place in list(self._pieces):
                    if freed >= num_bytes:
                        return freed
                    if takes_used or not self._is_used(self._pieces[place]):
                        freed += self._drop(place)
                        self.num_evicted += 1
            return freed

    def _is_used(self, piece: Piece) -> bool:
        """Return whether a text has one of its blocks, which would not be free without it."""
        parts = ((pool, block) for pool, blocks in enumerate(piece.blocks) for block in blocks if block)
        return any(self._holders(pool, block) > self._held[pool, block] for pool, block in parts)

    def _drop_oldest(self) -> int:
        return self._drop(next(iter(self._pieces)))

    def _drop(self, place: Place) -> int:
        """Forget a stretch; return the bytes that are free with it."""
        piece = self._pieces.pop(place)
        beside = self._beside[place.above, _first(place.tokens)]
        beside.remove(place)
        if not beside:
            del self._beside[place.above, _first(place.tokens)]
        if isinstance(place.above, int):
            self._children[place.above] -= 1
        self._children.pop(piece.number, None)
        freed = piece.hidden.nbytes
        self._hidden_bytes -= freed
        piece.account.give_back(freed)
        assert self._store is not None
        for pool, blocks in enumerate(piece.blocks):
            for block in filter(None, blocks):
                self._held[pool, block] -= 1
                if not self._held[pool, block]:
                    del self._held[pool, block]
                if self._holders(pool, block) == 1:
                    freed += self._block_bytes(pool)
            self._store.pools[pool].give_back(blocks)
        return freed

    def _forget_all(self) -> None:
        while self._pieces:
            self._drop_oldest()

    def _root(self, slot: int, cache: KVCache, owner: bytes, salt: str) -> Root:
        lengths = tuple(rope.length_class(cache.prompts[slot]) for rope in self._ropes)  # not of what is stored of it
        return Root(owner, salt, lengths, cache.row_count, cache.version(slot))

    def _spans(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return (start, stop) of every stretch of a text."""
        return ((start, min(start + self.chunk, len(tokens))) for start in range(0, len(tokens), self.chunk))

    def _touch(self, places: Sequence[Place]) -> None:
        """Note that these stretches of a text were used; the last one leaves first, as the others lead to it."""
        for place in reversed(places):
            if place in self._pieces:
                self._pieces.move_to_end(place)


def _place(above: Root | int, tokens: Sequence[int]) -> Place:
    return Place(above, array("q", tokens).tobytes())


def _first(tokens: bytes) -> int:
    """Return the first of a stretch's tokens."""
    return int.from_bytes(tokens[:8], "little")


def _common(one: bytes, other: bytes) -> int:
    """Return how many first tokens two stretches have in common."""
    if one == other:
        return len(one) // 8
    low, high = 0, min(len(one), len(other)) // 8
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[: 8 * middle] == other[: 8 * middle] else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Salted:
    """Fills ``Prefix`` for requests of one owner and salt."""

    cache: PrefixCache
    owner: bytes
    salt: str

    @property
    def keeps_answers(self) -> bool:
        """Return whether an answer has the bits of a prompt."""
        return self.cache.keeps_answers

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> list[Tensor]:
        """See ``PrefixCache.attach``."""
        return self.cache.attach(tokens, slot, cache, self.owner, self.salt)

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        """See ``PrefixCache.keep``."""
        self.cache.keep(tokens, slot, cache, hidden, self.owner, self.salt)

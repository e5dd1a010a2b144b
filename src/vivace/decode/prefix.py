"""Entries of prompts seen before, so that a shared beginning is read once.

Only bits that prefill itself would write are reused: whole chunks at their fixed places, and the last, shorter chunk
of a prompt that is repeated as a whole. With the entries of a token its residual at the top is kept, one row of the
model's width, because some drafters begin from it (EAGLE from those of the whole prompt). An answer, and what is
guessed for it, is therefore the same with and without this cache, whichever method sent the prompt before. Entries
written while decoding are not kept.

Chunks form a tree: a chunk is found by its tokens and by the chunk before it, the first one by whose request it was.
Keys are compared in full, never by a digest alone, so no choice of salt or tokens leads to the entries of another text.

An engine has one cache for all its calls (``vivace.load(..., prefix_cache="256MiB")``), and so has a server, whose
requests see the part of their own API key and salt. What it may hold is counted against the memory limit as a whole.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig

CHUNK = 256
"""Prompt tokens that go up together where a session is not told otherwise."""


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


class Place(NamedTuple):
    """Where a chunk stands: its tokens, and everything before them."""

    above: Root | int
    """Number of the chunk before it, or the root."""
    tokens: bytes
    """Its tokens, eight bytes each."""


@dataclass(frozen=True)
class Piece:
    """What one chunk left: keys and values of every layer, each (K, chunk, D), and residuals at the top (chunk, E)."""

    number: int
    """Names this chunk in the places of those that follow it; never used again."""
    layers: tuple[tuple[Tensor, Tensor], ...]
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the piece's keys, values and residuals take."""
        return self.hidden.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class PrefixCache:
    """Chunks of prompts by what was written up to their end; the least recently used leave first."""

    def __init__(self, config: ModelConfig, *, max_bytes: int, chunk: int = CHUNK) -> None:
        """Hold nothing yet.

        Args:
            config: of the model.
            max_bytes: memory that may be used.
            chunk: tokens per chunk, as the session has it.
        """
        self.chunk = chunk
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.num_queries = 0
        """Prompt tokens asked for so far."""
        self.num_hits = 0
        """Prompt tokens that were there."""
        self._num_layers = config.num_layers
        # where a prompt is rotated as a text of its whole length, only prompts of one length class share entries
        self._ropes = config.ropes
        self._pieces: OrderedDict[Place, Piece] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._pieces)

    def salted(self, salt: str | None = None, owner: bytes = b"") -> Salted:
        """The part of the cache that requests of this owner with this salt see."""
        return Salted(self, owner, salt or "")

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache, owner: bytes, salt: str) -> list[Tensor]:
        """Copy known chunks into an empty slot; returns the residuals (n, E) of each of them."""
        above: Root | int = self._root(tokens, cache, owner, salt)
        known, found, hidden = 0, [], []
        for start, stop in self._spans(tokens):
            place = _place(above, tokens[start:stop])
            piece = self._pieces.get(place)
            if piece is None:
                break
            cache.reserve([slot], [stop - 1])
            for layer, (keys, values) in enumerate(piece.layers):
                stored_keys, stored_values = cache.span(layer, slot, start, stop)
                stored_keys.copy_(keys)
                stored_values.copy_(values)
            above, known = piece.number, stop
            found.append(place)
            hidden.append(piece.hidden)
        if known:
            cache.commit([slot], [range(known)])
        self._touch(found)
        self.num_queries += len(tokens)
        self.num_hits += known
        return hidden

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor, owner: bytes, salt: str) -> None:
        """Copy the chunks that are not there yet, and make room for them; ``hidden`` (tokens, E) is the prompt's."""
        above: Root | int = self._root(tokens, cache, owner, salt)
        kept = []
        for start, stop in self._spans(tokens):
            place = _place(above, tokens[start:stop])
            piece = self._pieces.get(place)
            if piece is None:
                spans = (cache.span(layer, slot, start, stop) for layer in range(self._num_layers))
                layers = tuple((keys.clone(), values.clone()) for keys, values in spans)
                piece = self._pieces[place] = Piece(next(self._numbers), layers, hidden[start:stop].clone())
                self.nbytes += _held(place, piece)
            above = piece.number
            kept.append(place)
        self._touch(kept)
        while self.nbytes > self.max_bytes:
            self.nbytes -= _held(*self._pieces.popitem(last=False))

    def _root(self, tokens: Sequence[int], cache: KVCache, owner: bytes, salt: str) -> Root:
        lengths = tuple(rope.length_class(len(tokens)) for rope in self._ropes)
        return Root(owner, salt, lengths, cache.row_count)

    def _spans(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return (start, stop) of every chunk of a prompt."""
        return ((start, min(start + self.chunk, len(tokens))) for start in range(0, len(tokens), self.chunk))

    def _touch(self, places: Sequence[Place]) -> None:
        """Note that these chunks of a prompt were used; the last one leaves first, as the others lead to it."""
        for place in reversed(places):
            self._pieces.move_to_end(place)


def _place(above: Root | int, tokens: Sequence[int]) -> Place:
    return Place(above, array("q", tokens).tobytes())


def _held(place: Place, piece: Piece) -> int:
    """Memory of a chunk, its key included."""
    return len(place.tokens) + piece.nbytes


@dataclass(frozen=True)
class Salted:
    """Fills ``Prefix`` for requests of one owner and salt."""

    cache: PrefixCache
    owner: bytes
    salt: str

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> list[Tensor]:
        """See ``PrefixCache.attach``."""
        return self.cache.attach(tokens, slot, cache, self.owner, self.salt)

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        """See ``PrefixCache.keep``."""
        self.cache.keep(tokens, slot, cache, hidden, self.owner, self.salt)

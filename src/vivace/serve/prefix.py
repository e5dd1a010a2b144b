"""Entries of prompts seen before, so that a shared beginning is read once.

Only bits that prefill itself would write are reused: whole chunks at their fixed places, and the last, shorter chunk
of a prompt that is repeated as a whole. An answer is therefore the same with and without this cache. Entries written
while decoding are not kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig


@dataclass(frozen=True)
class Piece:
    """Copied entries of one chunk: keys and values of every layer, each (K, chunk, D)."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class PrefixCache:
    """Chunks of prompts by what was written up to their end; the least recently used leave first."""

    def __init__(self, config: ModelConfig, *, chunk: int, max_bytes: int) -> None:
        """Hold nothing yet.

        Args:
            config: of the model.
            chunk: tokens per chunk, as the session has it.
            max_bytes: memory that may be used.
        """
        self.chunk = chunk
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.num_queries = 0
        """Prompt tokens asked for so far."""
        self.num_hits = 0
        """Prompt tokens that were there."""
        self._num_layers = config.num_layers
        # there a prompt is rotated as a text of its whole length, so only prompts of one length share entries
        self._is_rotated_by_length = any(rope.kind == "dynamic" for rope in config.ropes)
        self._pieces: OrderedDict[bytes, Piece] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def salted(self, salt: str | None) -> Salted:
        """The part of the cache that requests with this salt see."""
        return Salted(self, salt or "")

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache, salt: str) -> int:
        """Copy known chunks into an empty slot; returns how many tokens are there now."""
        known = 0
        for key, start, stop in self._places(tokens, salt):
            piece = self._pieces.get(key)
            if piece is None:
                break
            self._pieces.move_to_end(key)
            cache.reserve([slot], [stop - 1])
            for layer, (keys, values) in enumerate(piece.layers):
                stored_keys, stored_values = cache.span(layer, slot, start, stop)
                stored_keys.copy_(keys)
                stored_values.copy_(values)
            known = stop
        if known:
            cache.commit([slot], [range(known)])
        self.num_queries += len(tokens)
        self.num_hits += known
        return known

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, salt: str) -> None:
        """Copy the chunks that are not there yet, and make room for them."""
        for key, start, stop in self._places(tokens, salt):
            if key in self._pieces:
                continue
            spans = (cache.span(layer, slot, start, stop) for layer in range(self._num_layers))
            piece = Piece(tuple((keys.clone(), values.clone()) for keys, values in spans))
            self._pieces[key] = piece
            self.nbytes += piece.nbytes
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._pieces.popitem(last=False)[1].nbytes

    def _places(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, int, int]]:
        """(key, start, stop) of every chunk; a key stands for everything up to its chunk's end."""
        key = f"{salt}\0{len(tokens) if self._is_rotated_by_length else ''}".encode()
        for start in range(0, len(tokens), self.chunk):
            stop = min(start + self.chunk, len(tokens))
            key = blake2b(key + array("q", tokens[start:stop]).tobytes(), digest_size=16).digest()
            yield key, start, stop


@dataclass(frozen=True)
class Salted:
    """Fills ``Prefix`` for requests of one salt."""

    cache: PrefixCache
    salt: str

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> int:
        """See ``PrefixCache.attach``."""
        return self.cache.attach(tokens, slot, cache, self.salt)

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache) -> None:
        """See ``PrefixCache.keep``."""
        self.cache.keep(tokens, slot, cache, self.salt)

"""One pass of the model over the beams of several requests: each beam is a row that names its own entries.

A row reads the prompt, which all beams of its request share, and then the entries of its own tokens (``Step.tail``).
So a pass over the beams of a request reads the prompt's keys and values once, and it needs no more of the cache when a
beam goes on in several ways. The rows of all requests are in one pass, beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.rows import extent_of
from vivace.core.step import Step
from vivace.decode.beams import BeamSearch, Candidate
from vivace.decode.distributions import processed
from vivace.decode.isolation import RequestFailed, blaming
from vivace.decode.request import Emitted, FinishReason, Request, StopRule
from vivace.decode.sequence import Sequence as Decoding
from vivace.errors import NoTokenError


def search_of(request: Request, device: torch.device) -> BeamSearch | None:
    """Return the search with which a request begins, None for one without beams."""
    if request.beams is None:
        return None
    return BeamSearch(request.beams, len(request.tokens), request.max_new_tokens, device)


def candidates_of(model: Decoder, cache: KVCache, sequences: Sequence[Decoding]) -> list[list[Candidate]]:
    """Run the beams of these sequences and return the best continuations of each; no search changes.

    Raises:
        RequestFailed: a request's own processors failed.
    """
    searches = [_search_of(sequence) for sequence in sequences]
    step, tokens = _call(cache, sequences, searches)
    hidden = model.run(model.embed(tokens, step), step)
    logprobs = torch.log_softmax(model.head(hidden, row_count=cache.row_count), -1)
    found = []
    parts = torch.split(logprobs, [len(search.ids) for search in searches])
    for sequence, search, part in zip(sequences, searches, parts, strict=True):
        request = sequence.request
        with blaming(sequence.slot, "its logits processors"):
            scores: Tensor = part
            if request.reads_prefix:
                prompt = search.ids.new_tensor(request.tokens).expand(len(search.ids), -1)
                scores = processed(request, torch.cat((prompt, search.ids), 1), part)
            found.append(search.candidates(scores, len(request.stop.end_tokens)))
    return found


def _call(cache: KVCache, sequences: Sequence[Decoding], searches: Sequence[BeamSearch]) -> tuple[Step, Tensor]:
    """Return the call of all beams' last tokens, or of a prompt's where a search begins, and the tokens (T,)."""
    slots: list[int] = []
    positions: list[int] = []
    seen: list[int] = []
    tokens, entries = [], []
    for sequence, search in zip(sequences, searches, strict=True):
        prompt, count = sequence.request.tokens, len(search.ids)
        slots += [sequence.slot] * count
        positions += [len(prompt) - 1 + search.length] * count
        seen += [len(prompt)] * count
        tokens.append(search.ids[:, -1] if search.length else search.ids.new_tensor(prompt[-1:]))
        entries.append(search.paths[:, -1] if search.length else search.paths.new_tensor([len(prompt) - 1]))
    entry = torch.cat(entries)
    cache.reserve(slots, entry.tolist())
    tail = entry.new_full((len(slots), max(search.length for search in searches)), -1)
    first = 0
    for search in searches:
        tail[first : first + len(search.paths), : search.length] = search.paths
        first += len(search.paths)
    position = entry.new_tensor(positions)
    step = Step(
        cache,
        entry.new_tensor(slots),
        position,
        entry,
        entry.new_tensor(seen),
        tail if tail.shape[1] else None,
        num_write=len(slots),
        num_feed=len(slots),
        extent=extent_of(slots, positions, position, cache),
        row_count=cache.row_count,
    )
    return step, torch.cat(tokens)


def advance_all(
    sequences: Sequence[Decoding], candidates: Sequence[Sequence[Candidate]], elapsed_s: float
) -> Iterator[tuple[Decoding, Emitted | RequestFailed | None]]:
    """Go on with the best continuations of each sequence; yield what it emits, if anything, or that it failed."""
    for sequence, own in zip(sequences, candidates, strict=True):
        sequence.num_passes += 1
        sequence.stats.verify_s += elapsed_s
        try:
            with blaming(sequence.slot, "its stop rule"):
                yield sequence, advance(sequence, own)
        except RequestFailed as failure:
            yield sequence, failure


def advance(sequence: Decoding, candidates: Sequence[Candidate]) -> Emitted | None:
    """Go on with the best continuations, and return what all texts have in common now, or how the search ended.

    Raises:
        NoTokenError: every continuation is excluded.
    """
    search, stop = _search_of(sequence), sequence.request.stop
    search.take(candidates, lambda row, token: _ends(search, stop, row, token))
    stats, now = sequence.stats, time.perf_counter()
    stats.count(0, 0, 0)
    if search.length == 1:
        sequence.first_at, stats.num_first_tokens = now, 1
    stats.decode_s = now - sequence.first_at
    known = sequence.num_certain
    if not search.is_done:
        sequence.num_certain = search.num_certain(known)
        tokens = tuple(search.ids[0, known : sequence.num_certain].tolist())
        return _emitted(sequence, tokens, now) if tokens else None
    if not search.hypotheses:
        raise NoTokenError("no token may come next")
    best = search.hypotheses[0]
    stats.num_tokens = len(best.tokens)
    return _emitted(sequence, best.tokens[known:], now, search)


def _emitted(sequence: Decoding, tokens: tuple[int, ...], now: float, ended: BeamSearch | None = None) -> Emitted:
    stats = sequence.stats
    stats.first_token_s = stats.first_token_s or now - sequence.admitted_at
    if ended is None:
        return Emitted(sequence.id, tokens, None, None, stats)
    found = tuple(ended.hypotheses[: ended.plan.num_return_sequences])
    reason: FinishReason = "stop" if found[0].is_stopped else "length"
    return Emitted(sequence.id, tokens, None, reason, stats, hypotheses=found)


def _ends(search: BeamSearch, stop: StopRule, row: int, token: int) -> bool:
    if not stop.reads_text:
        return stop.ends_with(token, search.length + 1)
    return stop.stops_at([*search.ids[row].tolist(), token])


def _search_of(sequence: Decoding) -> BeamSearch:
    assert sequence.search is not None, "it is searched with beams"
    return sequence.search

"""One pass of the model over the beams of several requests: each beam is a row that names its own entries.

A row reads the prompt, which all beams of its request share, and then the entries of its own tokens (``Step.tail``).
So a pass over the beams of a request reads the prompt's keys and values once, and it needs no more of the cache when a
beam goes on in several ways. The rows of all requests are in one pass, beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.rows import extent_of
from vivace.core.step import Step
from vivace.decode.beams import BeamSearch, Candidate, largest
from vivace.decode.distributions import processed
from vivace.decode.isolation import RequestFailed, blaming
from vivace.decode.request import Emitted, FinishReason, Request, StopRule
from vivace.decode.sequence import Sequence as Decoding
from vivace.errors import NoTokenError


def search_of(request: Request) -> BeamSearch | None:
    """Return the search with which a request begins, None for one without beams."""
    if request.beams is None:
        return None
    return BeamSearch(request.beams, len(request.tokens), request.max_new_tokens)


def candidates_of(model: Decoder, cache: KVCache, sequences: Sequence[Decoding]) -> list[list[Candidate]]:
    """Run the beams of these sequences and return the best continuations of each; no search changes.

    Raises:
        RequestFailed: a request's own processors failed, or what its first token follows holds no numbers.
    """
    searches = [_search_of(sequence) for sequence in sequences]
    started = time.perf_counter()
    step, tokens = _call(cache, sequences, searches)
    hidden = model.run(model.embed(tokens, step), step)
    logits = model.head(hidden, row_count=cache.row_count)
    passed = time.perf_counter()
    logprobs = torch.log_softmax(logits, -1)
    firsts = list(accumulate((len(search.ids) for search in searches), initial=0))
    for sequence, search, (first, stop) in zip(sequences, searches, pairwise(firsts), strict=True):
        request = sequence.request
        if not search.length:
            with blaming(sequence.slot, "its first pass"):
                sequence.require_numbers(hidden, first)
        if request.reads_prefix:
            with blaming(sequence.slot, "its logits processors"):
                prompt = np.broadcast_to(request.tokens, (stop - first, len(request.tokens)))
                texts = torch.from_numpy(np.concatenate((prompt, search.ids), 1)).to(logprobs.device)
                logprobs[first:stop] = processed(request, texts, logprobs[first:stop])
    counts = [
        search.num_candidates(len(sequence.request.stop.end_tokens))
        for sequence, search in zip(sequences, searches, strict=True)
    ]
    scores, best = (part.numpy() for part in largest(logprobs, max(counts)))
    found = [
        search.best_of(scores[first:stop], best[first:stop], count)
        for search, count, (first, stop) in zip(searches, counts, pairwise(firsts), strict=True)
    ]
    share = 1 / len(sequences)
    for sequence in sequences:
        sequence.stats.pass_s += (passed - started) * share
        sequence.stats.select_s += (time.perf_counter() - passed) * share
    return found


def _call(cache: KVCache, sequences: Sequence[Decoding], searches: Sequence[BeamSearch]) -> tuple[Step, Tensor]:
    """Return the call of all beams' last tokens, or of a prompt's where a search begins, and the tokens (T,)."""
    slots: list[int] = []
    positions: list[int] = []
    seen: list[int] = []
    last: list[int] = []
    entries: list[int] = []
    for sequence, search in zip(sequences, searches, strict=True):
        prompt, count = sequence.request.tokens, len(search.ids)
        slots += [sequence.slot] * count
        positions += [len(prompt) - 1 + search.length] * count
        seen += [len(prompt)] * count
        last += search.ids[:, -1].tolist() if search.length else prompt[-1:]
        entries += search.paths[:, -1].tolist() if search.length else [len(prompt) - 1]
    cache.reserve(slots, entries)
    slot, position, reads, tokens, entry = torch.tensor((slots, positions, seen, last, entries), device=cache.device)
    longest = max(search.length for search in searches)
    step = Step(
        cache,
        slot,
        position,
        entry,
        reads,
        _tails(searches, longest).to(cache.device) if longest else None,
        num_write=len(slots),
        num_feed=len(slots),
        extent=extent_of(slots, positions, position, cache),
        row_count=cache.row_count,
        longest=max(seen) + longest,
        slots=frozenset(slots),
        last=max(positions),
    )
    return step, tokens


def _tails(searches: Sequence[BeamSearch], longest: int) -> Tensor:
    """Return the entries of each beam's own tokens, (rows, longest), -1 padded."""
    tails = np.full((sum(len(search.paths) for search in searches), longest), -1, dtype=np.int64)
    first = 0
    for search in searches:
        tails[first : first + len(search.paths), : search.length] = search.paths
        first += len(search.paths)
    return torch.from_numpy(tails)


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
    search, stop, started = _search_of(sequence), sequence.request.stop, time.perf_counter()
    search.take(candidates, _ends(search, stop))
    stats, now = sequence.stats, time.perf_counter()
    stats.select_s += now - started
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


def _ends(search: BeamSearch, stop: StopRule) -> Callable[[int, int], bool]:
    """Return whether the text of a row ends with a further token."""
    if stop.reads_text:
        return lambda row, token: stop.stops_at([*search.ids[row].tolist(), token])
    ends = stop.ends_at(search.length + 1)
    return lambda _, token: token in ends


def _search_of(sequence: Decoding) -> BeamSearch:
    assert sequence.search is not None, "it is searched with beams"
    return sequence.search

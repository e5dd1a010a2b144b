"""The distribution of the next token after a draft row, for every request of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

import torch
from torch import Tensor

from vivace.core.sampling import bar_repeats, distribution, penalise
from vivace.core.seams import Draft
from vivace.decode.isolation import STOPS, blaming
from vivace.decode.request import Request


class Distributions:
    """Implements ``Distribution`` for the requests of a step: processors see the committed tokens and the row's draft
    path.
    """

    def __init__(self, requests: Mapping[int, Request], tokens: Mapping[int, Sequence[int]], stored: Sequence[int]):
        """Collect what the distributions of the live slots depend on.

        Args:
            requests: by slot.
            tokens: prompt and new tokens, by slot.
            stored: number of tokens in the cache, by slot; the nodes of a draft come after them.
        """
        self._requests = requests
        self._tokens = tokens
        self._stored = stored

    def is_greedy(self, slots: Sequence[int]) -> bool:
        """Return whether all of these slots take the argmax of the raw logits."""
        return all(self._requests[s].takes_argmax for s in slots)

    def __call__(self, logits: Tensor, draft: Draft, rows: Tensor) -> Tensor:
        """Return probabilities (n, V) for draft rows (n,) with these logits (n, V).

        Raises:
            RequestFailed: a request's own processors failed after its committed tokens.
        """
        out = torch.empty_like(logits)
        slots, order = draft.lists.slot, rows.tolist()
        by_slot: dict[int, list[int]] = {}
        for place, row in enumerate(order):
            by_slot.setdefault(slots[row], []).append(place)
        for slot, places in by_slot.items():
            with blaming(slot, "its logits processors"):
                out[places] = self._of(slot, logits[places], draft, [order[place] for place in places])
        return out

    def _of(self, slot: int, scores: Tensor, draft: Draft, rows: Sequence[int]) -> Tensor:
        """Return probabilities (n, V) for rows of one slot from their logits, which are overwritten.

        Where a processor fails after a guess, every token is excluded there; the error is raised when the text gets
        there.
        """
        request = self._requests[slot]
        prefixes = [self._prefix(draft, slot, row) for row in rows] if request.reads_prefix else []
        for place, prefix in enumerate(prefixes if request.processors else ()):
            try:
                scores[place] = _processed(request, prefix, scores[place])
            except STOPS:
                raise
            except BaseException:
                if rows[place] in draft.last_rows:
                    raise
                scores[place] = -math.inf
        barred = [_barred(request, prefix) for prefix in prefixes]
        for place, prefix in enumerate(prefixes):
            if (token := _forced(request, prefix)) is not None:  # nothing else is asked of this token
                scores[place], prefixes[place], barred[place] = _only(token, scores[place]), [], ()
        return distribution(scores, request.sampling, prefixes, barred)

    def _prefix(self, draft: Draft, slot: int, row: int) -> list[int]:
        tokens = draft.lists.tokens
        committed = list(self._tokens[slot][: self._stored[slot]])
        return committed + [tokens[r] for r in draft.path(row)]


def processed(request: Request, texts: Tensor, logprobs: Tensor) -> Tensor:
    """Return log p of the next token as a request's processors change it, for beam search.

    Args:
        request: whose processors.
        texts: (n, T) prompt and new tokens of each row.
        logprobs: (n, V), which is overwritten.
    """
    sampling = request.sampling
    for row, text in enumerate(texts.tolist() if request.processors or sampling.repetition_penalty != 1.0 else ()):
        if request.processors:
            logprobs[row] = _processed(request, text, logprobs[row])
        penalise(logprobs[row], sampling, text)
    if sampling.no_repeat_ngram_size:
        bar_repeats(logprobs, texts, sampling.no_repeat_ngram_size)
    text = texts[0]  # all are of one length, which is all that is asked of them
    if (token := _forced(request, text)) is not None:
        return logprobs.fill_(-math.inf).index_fill_(1, texts.new_tensor([token]), 0.0)
    if barred := _barred(request, text):
        logprobs[:, list(barred)] = -math.inf
    return logprobs


def _barred(request: Request, prefix: Sized) -> tuple[int, ...]:
    """Return what is never written, with the end tokens while the text is shorter than its least length."""
    new = len(prefix) - len(request.tokens)
    ends = tuple(request.stop.end_tokens) if new < request.stop.min_new_tokens else ()
    return (*request.barred, *ends)


def _forced(request: Request, prefix: Sized) -> int | None:
    """Return the only token that may come next, None where there is no such token."""
    new = len(prefix) - len(request.tokens)
    if new == request.max_new_tokens - 1 and request.forced_last is not None:
        return request.forced_last
    return request.forced_first if new == 0 else None


def _only(token: int, scores: Tensor) -> Tensor:
    """Return scores (V,) that exclude all but one token, whose score is 0."""
    forced = torch.full_like(scores, -math.inf)
    forced[token] = 0.0
    return forced


def _processed(request: Request, prefix: Sequence[int], scores: Tensor) -> Tensor:
    """Return logits (V,) after a prefix as a request's processors change them."""
    ids, found = torch.tensor([prefix], device=scores.device), scores[None]
    for processor in request.processors:
        found = processor(ids, found)
    return found[0]

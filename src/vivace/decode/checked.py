"""Verification of what a drafter proposed for some sequences, and the token behind what native code has verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.sampling import sample
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.decode.isolation import blaming
from vivace.decode.sequence import Sequence as Decoding
from vivace.decode.verify import Draw, TargetRows, verify_greedy, verify_sampled

AT_ONCE = 65536
"""Largest number of logits whose distributions are computed together: calls would take longer than numbers."""


class Checked(NamedTuple):
    """A proposal after verification: its kept tokens are those of plain decoding."""

    draft: Draft
    passed: TargetPass
    """Residuals of the draft's rows after the last layer."""
    verdict: Verdict
    logprobs: Tensor | None
    """(T, V) log p of every vocabulary entry after each row; None where no request wants it."""


def verified(
    model: Decoder, draft: Draft, traversal: Traversal, context: Context, sequences: Sequence[Decoding]
) -> Checked:
    """Run one target pass over a draft and keep the guesses that the model itself would have written."""
    row_count = context.cache.row_count
    passed = traversal.run(model, draft, context.cache)
    if len(passed.rows) < len(draft.tokens):  # the other rows were pruned during the pass
        draft = draft.only(passed.rows.tolist())
        passed = replace(passed, rows=torch.arange(len(draft.tokens)))
    is_greedy = context.distribution.is_greedy(context.slots)
    wants_logprobs = any(s.request.logprobs for s in sequences)
    if is_greedy and not wants_logprobs:
        chosen = model.greedy(passed.hidden, row_count=row_count).tolist()
        return Checked(draft, passed, verify_greedy(draft, chosen), None)
    logits = model.head(passed.hidden, row_count=row_count)
    logprobs = torch.log_softmax(logits, -1) if wants_logprobs else None
    if is_greedy:
        return Checked(draft, passed, verify_greedy(draft, logits.argmax(-1).tolist()), logprobs)
    target, draw = _target(logits, draft, context), _draw(model, logits, context)
    return Checked(draft, passed, verify_sampled(draft, target, context.generators, draw), logprobs)


def _draw(model: Decoder, logits: Tensor, context: Context) -> Draw | None:
    """Return what draws the token after a row with the noise of its position; None where native code cannot.

    Whether it can depends on the model, the session and the slot's request, never on other slots.
    """
    chain, drawings = model.backend.chain, context.drawings
    if chain is None or not chain.draws_by_position or context.cache.row_count != 1 or not drawings:
        return None

    def draw(slot: int, row: int, rows: int) -> int | None:
        if slot not in drawings:
            return None
        return chain.draw(logits[row], drawings[slot], context.cache.lengths[slot] + rows)

    return draw


def _drawn_last(model: Decoder, draft: Draft, logits: Tensor, context: Context) -> list[int]:
    """Draw the token after the last row of every slot of a draft without guesses, from logits (slots, V)."""
    draw, tokens = _draw(model, logits, context), []
    assert draw is not None
    for place, (slot, row, count) in enumerate(zip(draft.slots, draft.last_rows, draft.committed, strict=True)):
        token = draw(slot, place, count)
        if token is None:  # none may come: an error that names the slot
            distribution = context.distribution(logits[place : place + 1], draft, torch.tensor([row]))[0]
            with blaming(slot, "drawing its next token"):
                token = sample(distribution, context.generators[slot])
        tokens.append(token)
    return tokens


def _target(logits: Tensor, draft: Draft, context: Context) -> TargetRows:
    """Return the target's distribution after each row of a draft, from logits (T, V)."""
    if logits.device.type != "cpu" or (logits.numel() <= AT_ONCE and not context.drawings):
        return context.distribution(logits, draft, torch.arange(len(logits)))
    return AsReached(logits, draft, context)


@dataclass(frozen=True, eq=False)
class AsReached:
    """Implements ``TargetRows``: a row's distribution is computed when the text reaches it.

    Softmax and truncation pass over the vocabulary a dozen times, and most rows of a draft lie behind the first guess
    that is rejected.
    """

    logits: Tensor
    """(T, V)."""
    draft: Draft
    context: Context

    def __getitem__(self, row: int, /) -> Tensor:
        """Return the distribution (V,) after a row."""
        return self.context.distribution(self.logits[row : row + 1], self.draft, torch.tensor([row]))[0]


def read_on(model: Decoder, decided: Decided, context: Context, sequences: Sequence[Decoding]) -> Checked:
    """Choose the token after the last row of steps verified in native code; compute log p where a request wants it."""
    hidden, last = decided.passed.hidden, decided.draft.last_rows
    wants_all = any(s.request.logprobs for s in sequences)
    if not wants_all and not context.drawings:
        return Checked(decided.draft, decided.passed, decided.verdict(model.greedy(hidden[last]).tolist()), None)
    logits = model.head(hidden if wants_all else hidden[last])
    after = logits[last] if wants_all else logits
    chosen = _drawn_last(model, decided.draft, after, context) if context.drawings else after.argmax(-1).tolist()
    logprobs = torch.log_softmax(logits, -1) if wants_all else None
    return Checked(decided.draft, decided.passed, decided.verdict(chosen), logprobs)

"""Computes log p of a prompt's own tokens, for ``echo`` with ``logprobs``, in turns with decoding.

A text passes the model in one dense call, as in ``Engine.logits``, because attention to a text in pieces sums in
another order and gives other bits. So the layers are divided instead: in one turn the whole text passes as many layers
as cost what a chunk of a prompt costs in all of them, or some of its rows pass the head. No entry is cached, and the
logits of all positions are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.low_rank import AdapterSource
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.serve.choice import TokenInfo
from vivace.serve.token_text import Offsets, piece

MAX_BYTES = 64 << 20
"""Memory for the logits of one turn."""


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a text; every list has one entry for each token but the first."""

    logprobs: list[float]
    """log p of each token, given those before it."""
    top_tokens: list[list[int]]
    """The likeliest tokens at its position."""
    top_logprobs: list[list[float]]


def scoring(
    model: Decoder, tokens: Sequence[int], num_top: int, *, chunk: int, adapter: AdapterSource | None = None
) -> Iterator[Scored | None]:
    """Score a text, a turn whenever the next value is asked for: None until the last turn, which gives the scores.

    Args:
        model: the decoder.
        tokens: of the text, T of them.
        num_top: likeliest tokens to name for every place.
        chunk: rows; a turn costs what so many of them cost on the whole way up, or one layer's pass over the text.
        adapter: what the model wears; None is the model as it is.
    """
    bank = None if adapter is None else adapter.bank
    ids, num_layers, num_rows = torch.tensor(tokens, device=model.device), model.config.num_layers, len(tokens)
    step = Step.dense(1, num_rows, device=ids.device)
    with torch.inference_mode():
        h = model.embed(ids, step)
    per_turn = max(1, chunk * num_layers // num_rows)
    for start in range(0, num_layers, per_turn):
        step = Step.dense(1, num_rows, device=ids.device)  # a new one forgets the keys and values of the layers below
        if bank is not None:
            step = replace(step, deltas=(bank.deltas(torch.zeros_like(step.slot)),))
        with torch.inference_mode():
            h = model.run(h, step, start, min(start + per_turn, num_layers))
        yield None
    found = Scored([], [], [])
    per_turn = max(1, min(chunk, MAX_BYTES // (4 * model.config.vocab_size)))
    for start in range(0, num_rows - 1, per_turn):
        if start:
            yield None
        rows = slice(start, min(start + per_turn, num_rows - 1))
        with torch.inference_mode():
            logprobs = torch.log_softmax(model.head(h[rows]), -1)
            own, tops = logprobs.gather(1, ids[1:][rows, None])[:, 0], logprobs.topk(num_top)
        found.logprobs.extend(own.tolist())
        found.top_tokens.extend(tops.indices.tolist())
        found.top_logprobs.extend(tops.values.tolist())
    yield found


def spelt(tokenizer: Tokenizer, tokens: Sequence[int], scored: Scored) -> list[TokenInfo]:
    """Return the tokens of a text with the data of each; the first has none."""
    pieces = [piece(tokenizer, token) for token in tokens]
    offsets = Offsets(tokenizer).push(pieces)
    found = [TokenInfo(pieces[0], None)]
    rest = zip(pieces[1:], offsets[1:], scored.logprobs, scored.top_tokens, scored.top_logprobs, strict=True)
    for one, offset, logprob, tops, logs in rest:
        top = tuple((piece(tokenizer, other), value) for other, value in zip(tops, logs, strict=True))
        found.append(TokenInfo(one, logprob, top, offset))
    return found

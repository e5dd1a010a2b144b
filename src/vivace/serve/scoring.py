"""log p of a prompt's own tokens, for ``echo`` with ``logprobs``: in turns, between which others are decoded.

A text goes up in one dense call, as in ``Engine.logits``, because attention to a text in pieces sums in another order
and gives other bits. What is divided is the way up: a turn takes the whole text through as many layers as cost what a
chunk of a prompt costs in all of them, or reads some rows at the top. So no entry is cached, and the logits of all
places are never held together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.serve.choice import TokenInfo
from vivace.serve.token_text import Offsets, piece

MAX_BYTES = 64 << 20
"""Memory for the logits of one turn."""


@dataclass(frozen=True)
class Scored:
    """What the model makes of a text; every list has an entry for each token but the first."""

    logprobs: list[float]
    """log p of the token, given those before it."""
    top_tokens: list[list[int]]
    """The likeliest tokens of its place."""
    top_logprobs: list[list[float]]


def scoring(model: Decoder, tokens: Sequence[int], num_top: int, *, chunk: int) -> Iterator[Scored | None]:
    """Score a text, a turn whenever the next value is asked for: None until the last turn, which gives the scores.

    Args:
        model: the decoder.
        tokens: of the text, T of them.
        num_top: likeliest tokens to name for every place.
        chunk: rows; a turn costs what so many of them cost on the whole way up, or one layer's pass over the text.
    """
    ids, num_layers, num_rows = torch.tensor(tokens, device=model.device), model.config.num_layers, len(tokens)
    step = Step.dense(1, num_rows, device=ids.device)
    with torch.inference_mode():
        h = model.embed(ids, step)
    per_turn = max(1, chunk * num_layers // num_rows)
    for start in range(0, num_layers, per_turn):
        step = Step.dense(1, num_rows, device=ids.device)  # a new one forgets the keys and values of the layers below
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
    """The tokens of a text with what is known of each, nothing of the first."""
    pieces = [piece(tokenizer, token) for token in tokens]
    offsets = Offsets(tokenizer).push(pieces)
    found = [TokenInfo(pieces[0], None)]
    rest = zip(pieces[1:], offsets[1:], scored.logprobs, scored.top_tokens, scored.top_logprobs, strict=True)
    for one, offset, logprob, tops, logs in rest:
        top = tuple((piece(tokenizer, other), value) for other, value in zip(tops, logs, strict=True))
        found.append(TokenInfo(one, logprob, top, offset))
    return found

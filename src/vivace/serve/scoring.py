"""log p of a prompt's own tokens, for ``echo`` with ``logprobs``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vivace.engine import Engine
from vivace.errors import CapacityError
from vivace.serve.choice import TokenInfo
from vivace.serve.token_text import Offsets, piece
from vivace.units import format_bytes

MAX_BYTES = 512 << 20
"""Memory for the logits of one prompt."""


def score(engine: Engine, tokens: Sequence[int], num_top: int) -> list[TokenInfo]:
    """The tokens with log p of each under the model, nothing known of the first.

    Args:
        engine: the model.
        tokens: of the prompt.
        num_top: likeliest tokens to name for every place.

    Raises:
        CapacityError: the logits of all places would take too much memory.
    """
    needed = 4 * len(tokens) * engine.model.config.vocab_size
    if needed > MAX_BYTES:
        raise CapacityError(
            f"echo with logprobs needs {format_bytes(needed)} for {len(tokens)} tokens; this server gives "
            f"{format_bytes(MAX_BYTES)}; shorten the prompt"
        )
    logprobs = torch.log_softmax(engine.logits([list(tokens)])[0, :-1], -1)
    own = logprobs.gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(num_top)
    tokenizer = engine.tokenizer
    pieces = [piece(tokenizer, token) for token in tokens]
    offsets = Offsets(tokenizer).push(pieces)
    found = [TokenInfo(pieces[0], None)]
    rest = zip(pieces[1:], offsets[1:], own, ids.tolist(), values.tolist(), strict=True)
    for one, offset, logprob, tops, logs in rest:
        top = tuple((piece(tokenizer, other), value) for other, value in zip(tops, logs, strict=True))
        found.append(TokenInfo(one, logprob, top, offset))
    return found

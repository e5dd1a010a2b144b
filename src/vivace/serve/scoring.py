"""log p of a prompt's own tokens, for ``echo`` with ``logprobs``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vivace.engine import Engine
from vivace.errors import CapacityError
from vivace.serve.choice import TokenInfo, piece
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
    found = [TokenInfo(tokens[0], piece(tokenizer, tokens[0]), None, (), 0, None)]
    for token, logprob, tops, logs in zip(tokens[1:], own, ids.tolist(), values.tolist(), strict=True):
        top = tuple((other, piece(tokenizer, other), value) for other, value in zip(tops, logs, strict=True))
        found.append(TokenInfo(token, piece(tokenizer, token), logprob, top, 0, None))
    return found

"""Oracles of what speculative streams learn, on a frozen model and together with it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tests.objectives.case import BATCH, COUNT, Case, disturbed, frozen, head, learns
from tests.objectives.naive import cross_entropy, log_probs, predicting, residuals_of
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.forward import StreamForwardPass, Verified
from vivace.methods.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.methods.multistream.shared import SharedLoss, SharedObjective, SharedStreams
from vivace.methods.multistream.streams import Streams

Attach = Literal["every", "kept"]


def streams_of(model: Decoder, streams: Streams, tokens: Tensor, attach: Attach = "kept") -> Tensor:
    """Streams of the last but one token of a text, which know the last where they are told, (streams, E)."""
    climb, cache = StreamForwardPass(streams, StreamPlan((1, 1, 1), attach)), model.new_cache(1, 64)
    if attach == "every":
        every = climb.run(model, Draft.committed_only({0: tokens[:-1].tolist()}), cache).streams
        assert every is not None
        return every[-1]
    passed = climb.run(model, Draft.committed_only({0: tokens[:-1].tolist()}), cache)
    cache.commit([0], [range(len(tokens) - 1)])
    decided = Verified(passed.hidden[-1:], tokens[-1:]) if streams.config.feedback else None
    assert passed.entering is not None
    return climb.follow(model, [0], passed.entering[-1:], cache, decided)[0]


def streams_loss(model: Decoder, streams: Streams, hard: float, decay: float, attach: Attach = "kept") -> float:
    """Sum over positions of the streams' losses on the law of the model mixed with the token."""
    total = 0.0
    for text, at, _ in predicting(BATCH):
        tokens = BATCH.tokens[text]
        top, rows = residuals_of(model, tokens)[0][-1], streams_of(model, streams, tokens[: at + 2], attach)
        for place in range(3):
            later = at + 1 + place
            if learns(text, later):
                said, true = log_probs(head(model, rows[place])), log_probs(head(model, top[later]))
                soft = -sum(q * float(torch.tensor(p).exp()) for q, p in zip(said, true, strict=True))
                total += decay**place * ((1 - hard) * soft - hard * said[int(tokens[later + 1])])
    return total


def pruner_loss(model: Decoder, streams: Streams, insertion: int) -> float:
    """Sum over positions: what follows a row, guessed where streams enter."""
    if streams.pruner is None:
        return 0.0
    total = 0.0
    for text, at, token in predicting(BATCH):
        entering = residuals_of(model, BATCH.tokens[text])[0][insertion][at]
        total += cross_entropy(head(model, entering + streams.pruner.up @ (streams.pruner.down @ entering)), token)
    return total


def multistream(**fields: object) -> Case:
    """Streams on a frozen model."""
    model = frozen()
    config = MultistreamConfig(streams=3, insertion_layer=2, rank=4, bottleneck=8, pruner_rank=4, **fields)  # type: ignore[arg-type]
    made = disturbed(Streams(config, model.config))
    loss = MultistreamLoss(hard=0.3, decay=0.8, pruner=0.4, rows=12)

    def oracle() -> float:
        return (streams_loss(model, made, 0.3, 0.8) + 0.4 * pruner_loss(model, made, 2)) / COUNT

    return Case(model, MultistreamObjective(made, loss), oracle)


def shared(*, pruner_rank: int = 4, feedback: bool = False, attach: Attach = "kept") -> Case:
    """Terms on the model itself: its next tokens, its streams, and a pruner whose loss does not reach it."""
    model = frozen()
    own = {"rank": 0, "bottleneck": 0, "pruner_rank": pruner_rank}
    config = MultistreamConfig(streams=3, insertion_layer=2, **own, feedback=feedback)
    made = disturbed(SharedStreams(config, model.config, rank=4), 0.05)

    def oracle() -> float:
        merged = frozen()
        made.merge(merged)
        alone = Streams(config, model.config)
        alone.load_state_dict(made.tensors())
        main = sum(
            cross_entropy(head(merged, residuals_of(merged, BATCH.tokens[text])[0][-1][at]), token)
            for text, at, token in predicting(BATCH)
        )
        others = 0.6 * streams_loss(merged, alone, 1.0, 0.8, attach) + 0.4 * pruner_loss(merged, alone, 2)
        return (main + others) / COUNT

    objective = SharedObjective(made, SharedLoss(alpha=0.6, decay=0.8, pruner=0.4, rows=12), attach=attach)
    return Case(model, objective, oracle)

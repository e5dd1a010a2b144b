"""Oracles of what the rivals learn on a frozen model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.decode.tiny_decoders import build
from tests.objectives.case import BATCH, COUNT, Case, disturbed, frozen, head, learns
from tests.objectives.naive import (
    binary_cross_entropy,
    cross_entropy,
    divergence,
    predicting,
    residuals_of,
    smooth_distance,
)
from vivace.core.draft_head import DraftHead
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.tree import TreePlan
from vivace.methods.confidence.drafter import Confidence, ConfidenceConfig, ConfidenceObjective
from vivace.methods.draft.objective import StudentObjective
from vivace.methods.eagle.drafter import EagleConfig, EagleLayer
from vivace.methods.eagle.objective import EagleLoss, EagleObjective
from vivace.methods.early_exit.drafter import Exit, ExitConfig, ExitGuess
from vivace.methods.early_exit.objective import ExitObjective
from vivace.methods.medusa.drafter import MedusaConfig, MedusaHeads
from vivace.methods.medusa.objective import MedusaLoss, MedusaObjective
from vivace.methods.uno.drafter import Uno, UnoConfig, UnoDeltas
from vivace.methods.uno.objective import UnoLoss, UnoObjective
from vivace.train.distillation import DistillationLoss

TERMS: dict[str, Any] = {"distillation": 0.7, "cross_entropy": 0.2, "rows": 5}
RIVAL = DistillationLoss(**TERMS)


def rival_loss(truth: Tensor, guess: Tensor, token: int) -> float:
    """Of one guess."""
    return 0.7 * divergence(truth, guess) + 0.2 * cross_entropy(guess, token)


def medusa(*, own_output: bool = True) -> Case:
    """Heads for tokens further and further on."""
    model = frozen()
    heads = MedusaHeads(MedusaConfig(3, own_output), model.config)
    heads.start_from(model)
    disturbed(heads, 0.02)

    def oracle() -> float:
        total = 0.0
        for text, at, _ in predicting(BATCH):
            top = residuals_of(model, BATCH.tokens[text])[0][-1]
            for place in range(3):  # head 0 says what follows the token after the next position
                later = at + 1 + place
                if learns(text, later):
                    guess = heads.logits(place, model.norm(top[at : at + 1]), DraftHead(model))[0]
                    token = int(BATCH.tokens[text, later + 1])
                    total += 0.8**place * rival_loss(head(model, top[later]), guess, token)
        return total / COUNT

    return Case(model, MedusaObjective(heads, MedusaLoss(decay=0.8, **TERMS)), oracle)


def eagle() -> Case:
    """The next final residual, and what the head makes of it."""
    model = frozen()
    layer = EagleLayer(EagleConfig(), model.config)
    disturbed(nn.ParameterList(layer.trainable()))

    def oracle() -> float:
        total = 0.0
        for text, at, token in predicting(BATCH):
            tokens = BATCH.tokens[text]
            slow, _ = residuals_of(model, tokens)
            known = model.norm(slow[-1])
            before = torch.cat((torch.zeros(1, model.config.width), known[:-1]))
            guess = layer(before, slow[0], Step.dense(1, len(tokens)))[at]
            total += rival_loss(head(model, slow[-1][at]), head(model, guess), token)
            total += 0.6 * smooth_distance(model.norm(guess[None])[0], known[at]) / model.config.width
        return total / COUNT

    return Case(model, EagleObjective(layer, EagleLoss(regression=0.6, noise=0.0, **TERMS)), oracle)


def deed() -> Case:
    """An exit below the top."""
    model = frozen()
    exit_ = disturbed(Exit(ExitConfig(2, 8), model.config))

    def oracle() -> float:
        total = 0.0
        for text, at, token in predicting(BATCH):
            slow, _ = residuals_of(model, BATCH.tokens[text])
            rows = torch.arange(11)
            p = ExitGuess(model, exit_).forward(model, slow[0], Step.dense(1, 11), rows, 0)[1][at]
            total += rival_loss(head(model, slow[-1][at]), head(model, p), token)
        return total / COUNT

    return Case(model, ExitObjective(exit_, RIVAL), oracle)


def student() -> Case:
    """A small model of its own."""
    model, small = frozen(), build(torch.float32, num_layers=1, seed=9)

    def oracle() -> float:
        total = 0.0
        for text, at, token in predicting(BATCH):
            truth, guess = (residuals_of(each, BATCH.tokens[text])[0][-1][at] for each in (model, small))
            total += rival_loss(head(model, truth), head(small, guess), token)
        return total / COUNT

    return Case(model, StudentObjective(small, RIVAL), oracle)


def uno() -> Case:
    """Noise rows below a position."""
    model = frozen()
    terms = disturbed(UnoDeltas(UnoConfig(4, 4), model.config))

    def block(tokens: Tensor) -> Tensor:
        """What three noise rows below a text's last token say."""
        cache = model.new_cache(1, 64)
        if len(tokens) > 1:
            ForwardPass().run(model, Draft.committed_only({0: tokens[:-1].tolist()}), cache, chunk=True)
            cache.commit([0], [range(len(tokens) - 1)])
        drafter = Uno(model, terms, TreePlan((1,) * 4))
        return drafter.block(Draft.committed_only({0: tokens[-1:].tolist()}), [4], cache)[1:]

    def oracle() -> float:
        total, count = 0.0, 0
        for text, at, _ in predicting(BATCH):
            if learns(text, at + 1):  # others have nothing to teach
                top, rows = residuals_of(model, BATCH.tokens[text])[0][-1], block(BATCH.tokens[text, : at + 1])
                count += 1
                for place in range(3):
                    later = at + 1 + place
                    if learns(text, later):
                        token = int(BATCH.tokens[text, later + 1])
                        total += 0.8**place * rival_loss(head(model, top[later]), head(model, rows[place]), token)
        return total / count

    return Case(model, UnoObjective(terms, UnoLoss(decay=0.8, blocks=10_000, **TERMS)), oracle)


def confidence() -> Case:
    """Whether a gate says what the top says."""
    model = frozen()
    learned = disturbed(Confidence(ConfidenceConfig((1, 3), "learned"), model.config))

    def oracle() -> float:
        total = 0.0
        for text, at, _ in predicting(BATCH):
            slow, _ = residuals_of(model, BATCH.tokens[text])
            for gate in (1, 3):
                agrees = head(model, slow[gate][at]).argmax() == head(model, slow[-1][at]).argmax()
                assert learned.classifier is not None
                score = float(learned.classifier(model.norm(slow[gate][at : at + 1]))[0])
                total += binary_cross_entropy(score, bool(agrees))
        return total / (2 * COUNT)

    return Case(model, ConfidenceObjective(learned), oracle)

"""Oracles of what whole models learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.objectives.case import BATCH, LAYERS, LENGTH, Case, disturbed, head, learns, trained
from tests.objectives.naive import binary_cross_entropy, cross_entropy, log_probs, predicting, residuals_of
from vivace.core.config import MoeConfig
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.methods.mod.drafter import ModConfig
from vivace.methods.mod.objective import ModObjective
from vivace.methods.skipdecode.drafter import SkipObjective, SkipPlan
from vivace.train.next_token import BalancedNextToken, NextToken, SparseNextToken
from vivace.train.supervised import SupervisedObjective, Supervision

ENDS = [1 + max(scored.nonzero()[:, 0].tolist()) for scored in BATCH.scored]
"""Where the texts end: at their last scored token, behind which is padding."""


def next_token(model: Decoder, tops: Callable[[Tensor, int], Tensor]) -> float:
    """The mean cross-entropy of next tokens, given the residuals at the top of a text."""
    losses = [cross_entropy(head(model, tops(BATCH.tokens[t], t)[at]), token) for t, at, token in predicting(BATCH)]
    return sum(losses) / len(losses)


def top_of(model: Decoder) -> Callable[[Tensor, int], Tensor]:
    """The model's own."""
    return lambda tokens, _: residuals_of(model, tokens)[0][-1]


def plain() -> Case:
    """Next tokens and no more."""
    model = trained()
    return Case(model, NextToken(model, rows=5), lambda: next_token(model, top_of(model)))


def supervised() -> Case:
    """Two layers speak beside the top."""
    model = trained()

    def oracle() -> float:
        losses = [next_token(model, lambda tokens, _, at=at: residuals_of(model, tokens)[0][at]) for at in (4, 1, 3)]
        return losses[0] + 0.3 * losses[1] + 0.3 * losses[2]

    return Case(model, SupervisedObjective(model, Supervision((1, 3), 0.3), rows=5), oracle)


def skipping() -> Case:
    """Layers by place: four for an answer's first token, two from its fourth on."""
    model = trained()
    plan = SkipPlan(most=4, fewest=2, horizon=3)

    def top(tokens: Tensor, text: int) -> Tensor:
        begins = int(BATCH.scored[text].int().argmax())
        step, h = Step.dense(1, LENGTH), model.embed(tokens, Step.dense(1, LENGTH))
        for layer in range(LAYERS):
            above = model.run(h, step, layer, layer + 1)
            for at in range(LENGTH):  # the row before an answer's first token is its place 0
                place = at - begins + 1
                budget = 4 - 2 * min(1.0, place / 3) if place >= 0 else 4
                if layer == 0 or layer >= 4 - (int(budget) - 1):
                    h = torch.cat((h[:at], above[at : at + 1], h[at + 1 :]))
        return h

    return Case(model, SkipObjective(model, plan, rows=5), lambda: next_token(model, top))


def depths() -> Case:
    """Two fifths of an answer's rows pass every second layer, and routers tell which."""
    model = trained()
    objective = ModObjective(model, ModConfig(2, 0.4), anneal_steps=0, router_weight=0.3, rows=5)
    objective.step = 1
    disturbed(objective.routers, 0.5)

    def run(tokens: Tensor, text: int) -> tuple[Tensor, list[float]]:
        answers = [at for at in range(LENGTH) if learns(text, at)]
        step, h, told = Step.dense(1, LENGTH), model.embed(tokens, Step.dense(1, LENGTH)), list[float]()
        for layer in range(LAYERS):
            above = model.run(h, step, layer, layer + 1)
            if layer % 2 == 1:
                r = objective.routers.logit(layer // 2, h)
                through = sorted(answers, key=lambda at: -float(r[at]))[: -(-len(answers) * 4 // 10)]
                told += [binary_cross_entropy(float(r[at]), at in through) for at in answers]
                for at in answers:
                    share = 2 / (1 + float((-r[at]).exp())) if at in through else 0.0
                    above[at] = h[at] + share * (above[at] - h[at])
            h = above
        return h, told

    def oracle() -> float:
        told = [each for text in range(3) for each in run(BATCH.tokens[text], text)[1]]
        return next_token(model, lambda tokens, text: run(tokens, text)[0]) + 0.3 * sum(told) / len(told)

    return Case(model, objective, oracle, {"router_loss": 0.3})


def balanced() -> Case:
    """Experts equally busy: X times the sum of f_e P_e, the mean over layers. Padding is not counted."""
    model = trained(moe=MoeConfig(num_experts=5, top_k=2, expert_width=16, normalise=True))

    def uneven(layer: int) -> float:
        busy, sure = [0] * 5, [0.0] * 5
        for text in range(3):
            slow, step = residuals_of(model, BATCH.tokens[text])
            rows = model.layers[layer].route(model.layers[layer].attend(slow[layer], step))  # type: ignore[operator]
            for logits in rows[: ENDS[text]]:
                for expert, each in enumerate(log_probs(logits)):
                    sure[expert] += math.exp(each) / sum(ENDS)
                    busy[expert] += expert in logits.topk(2).indices
        return 5 * sum(count / sum(busy) * chance for count, chance in zip(busy, sure, strict=True))

    def oracle() -> float:
        return next_token(model, top_of(model)) + 0.6 * sum(map(uneven, range(LAYERS))) / LAYERS

    return Case(model, BalancedNextToken(model, weight=0.6, rows=5), oracle, {"uneven": 0.6})


def sparse() -> Case:
    """Few active neurons: (sum a)^2 / (F sum a^2) of each row, the mean over rows and layers."""
    model = trained(activation="relu")

    def hoyer(layer: int, text: int) -> float:
        slow, step = residuals_of(model, BATCH.tokens[text])
        module, total = model.layers[layer], 0.0
        inner = module.feed_forward.up(module.ffn_norm(module.attend(slow[layer], step)))  # type: ignore[operator, union-attr]
        for row in inner[: ENDS[text]]:
            active = [max(0.0, a) for a in row.tolist()[:64]]
            total += sum(active) ** 2 / (64 * sum(a * a for a in active))
        return total / sum(ENDS)

    def oracle() -> float:
        shares = [hoyer(layer, text) for layer in range(LAYERS) for text in range(3)]
        return next_token(model, top_of(model)) + 0.6 * sum(shares) / LAYERS

    return Case(model, SparseNextToken(model, weight=0.6, rows=5), oracle, {"hoyer": 0.6})

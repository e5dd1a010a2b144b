"""Oracles of what accelerated residuals learn: drafting, gates and their router, foresight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.objectives.case import BATCH, COUNT, LAYERS, Case, disturbed, frozen, head
from tests.objectives.naive import (
    binary_cross_entropy,
    cross_entropy,
    divergence,
    misalignment,
    predicting,
    residuals_of,
    smooth_distance,
)
from vivace.core.config import MoeConfig
from vivace.methods.dynamic.gates import GateConfig, GatedAccelerator, GatesConfig
from vivace.methods.dynamic.objective import GatesLoss, GatesObjective, Trails, router_loss
from vivace.methods.dynamic.router import RouterConfig, make_router
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.residual import Accelerator
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightLoss
from vivace.storage.experts.foresight.objective import ForesightObjective
from vivace.storage.experts.foresight.weights import Foresight


def multirate(**fields: object) -> Case:
    """One gate that shall say what the top says, and arrive where it arrives."""
    model = frozen()
    config = MultirateConfig(exit_layer=2, rank=4, bottleneck=8, **fields)  # type: ignore[arg-type]
    fast = disturbed(Accelerator(config, model.config))
    loss = MultirateLoss(0.7, 0.2, 0.4, temperature=1.7, max_lag=1, rows=4)

    def guess(tokens: Tensor) -> Tensor:
        """p at the gate of every position of a text: the one before it is the last that was verified."""
        slow, step = residuals_of(model, tokens)
        before = torch.cat((torch.zeros(1, model.config.width), model.norm(slow[-1])[:-1]))
        p = fast.start(slow[0], before)
        terms = fast.deltas(torch.zeros(len(tokens), dtype=torch.int64))
        reading = replace(step, num_write=0, num_feed=0 if config.mode == "lite" else len(tokens), deltas=(terms,))
        for reach, start, stop in fast.stretches():
            p = p if reach is None else reach.over_text(p, model, step, torch.arange(len(tokens))[None] - 1)
            p = model.run(p, reading, start, stop)
        return fast.at_exit(p)

    def oracle() -> float:
        total = 0.0
        for text, at, token in predicting(BATCH):
            top, p = residuals_of(model, BATCH.tokens[text])[0][-1][at], guess(BATCH.tokens[text])[at]
            total += 0.7 * 1.7**2 * divergence(head(model, top), head(model, p), 1.7)
            total += 0.2 * cross_entropy(head(model, p), token) + 0.4 * misalignment(p, top)
        return total / COUNT

    return Case(model, MultirateObjective(fast, loss), oracle)


def gates() -> Case:
    """Two gates, each with a target of its own."""
    model = frozen()
    config = GatesConfig((GateConfig(1), GateConfig(3, rate=1.25)), rank=4, bottleneck=8)
    fast = disturbed(GatedAccelerator(config, model.config))
    loss = GatesLoss(0.7, 0.2, 0.4, temperature=1.7, rows=4)

    def oracle() -> float:
        total = 0.0
        for text, at, token in predicting(BATCH):
            slow, step = residuals_of(model, BATCH.tokens[text])
            for gate, (start, stop, aim) in enumerate(((0, 1, 4), (1, 3, 3))):
                p = fast.at_gate(gate, fast.accelerate(model, gate, slow[start], step, (stop,))[:, -1])[at]
                total += 0.7 * 1.7**2 * divergence(head(model, slow[-1][at]), head(model, p), 1.7)
                total += 0.2 * cross_entropy(head(model, p), token) + 0.4 * misalignment(p, slow[aim][at])
        return total / (2 * COUNT)

    return Case(model, GatesObjective(fast, loss), oracle)


EXPERTS = MoeConfig(num_experts=5, top_k=2, expert_width=16, normalise=True)


def foresight() -> Case:
    """A mixture in every layer but the first; p speaks of layer 1 at once and of layers 2 and 3 after one."""
    model = frozen(moe=EXPERTS, moe_layers=(False, True, True, True))
    fast = disturbed(Foresight(ForesightConfig(2.0, rank=4, bottleneck=8, forecast=6, leads=(1, 2)), model.config))

    def of_text(tokens: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Slow residuals, p after none and one layer, and u before every router with that router's logits."""
        slow, step = residuals_of(model, tokens)
        terms = fast.deltas(torch.zeros(len(tokens), dtype=torch.int64))
        p = model.run(slow[0], replace(step, num_write=0, num_feed=0, deltas=(terms,)), 0, 1)
        inner = [model.layers[m].attend(slow[m], step) for m in range(LAYERS)]  # type: ignore[operator]
        routed = [inner[0], *(model.layers[m].route(inner[m]) for m in (1, 2, 3))]  # type: ignore[operator]
        return slow, [slow[0], p], inner, routed

    def asked(layer: int, lead: int | None, residual: Tensor) -> Tensor:
        size = residual.double().square().mean().add(model.config.norm_eps).sqrt()
        return fast.router(model.layers[layer], lead).detach().double() @ (residual.double() / size)  # type: ignore[arg-type]

    def choices() -> list[tuple[int, int, int, list[int]]]:
        """(mixture, text, position, experts chosen) in the order of the texts."""
        routed = [of_text(BATCH.tokens[text])[3] for text in range(3)]
        return [
            (m, text, at, routed[text][m][at].topk(2).indices.tolist())
            for m in (1, 2, 3)
            for text, at, _ in predicting(BATCH)
        ]

    def forecast() -> float:
        """Both questions for every expert in every pass: is it chosen, and how soon again."""
        chosen, total = choices(), 0.0
        for index, (m, text, at, experts) in enumerate(chosen):
            slow = of_text(BATCH.tokens[text])[0]
            assert fast.forecast is not None
            f, g = (each[0, m - 1] for each in fast.forecast(slow[-1][at - 1 : at], slow[0][at : at + 1]))
            others = [pair[3] for pair in chosen if pair[0] == m]
            place = index % COUNT
            later = others[place + 1 :] + others[: place + 1]  # the first text follows the last
            for expert in range(5):
                soon = next((n for n, again in enumerate(later, 1) if expert in again), 64)
                total += binary_cross_entropy(float(f[expert]), expert in experts)
                total += smooth_distance(g[expert][None], torch.tensor([float(soon)]).log2())
        return total / (len(chosen) * 5)

    def oracle() -> float:
        ahead, early = 0.0, {1: [0.0] * 2, 2: [0.0]}  # layer 1 is not asked one early: that is the embedding
        for text, at, _ in predicting(BATCH):
            slow, p, inner, routed = of_text(BATCH.tokens[text])
            for m, depth in ((1, 0), (2, 1), (3, 1)):
                seen = fast.at(m, p[depth][at], slow[depth][at])[0]
                ahead += 0.7 * divergence(routed[m][at], asked(m, None, seen)) / (3 * COUNT)
                ahead += 0.4 * misalignment(p[depth][at], inner[m][at]) / (3 * COUNT)
            for lead, layers in ((1, (2, 3)), (2, (3,))):
                for place, m in enumerate(layers):
                    early[lead][place] += divergence(routed[m][at], asked(m, lead, slow[m - lead][at])) / COUNT
        return ahead + 0.7 * sum(sum(kl) / len(kl) for kl in early.values()) + 0.6 * forecast()

    return Case(model, ForesightObjective(fast, ForesightLoss(0.7, 0.4, 0.6)), oracle)


def router() -> tuple[float, Tensor]:
    """The loop's loss of a router on positions of which one gate's few are right, and the router's own."""
    model = frozen()
    config, looks = GatesConfig((GateConfig(1), GateConfig(3))), RouterConfig("mlp", latent=8)
    made = disturbed(make_router(looks, config, model.config.width)).requires_grad_(False)
    torch.manual_seed(2)
    states = tuple(torch.randn(12, len(looks.depths(config, gate)), model.config.width) for gate in (0, 1))
    agrees = torch.stack((torch.arange(12) < 1, torch.arange(12) < 8), 1)
    says = tuple(trail[:, -1] for trail in states)
    total = 0.0
    for gate, weight in enumerate((5.0, 4 / 8)):  # 11 wrong for one right counts five times; 4 for 8 counts half
        for place in range(12):
            score = float(made(gate, states[gate][place : place + 1], lambda: says[0])[0])
            label = bool(agrees[place, gate])
            total += (weight if label else 1.0) * binary_cross_entropy(score, label) / 24
    return total, router_loss(model, made, Trails(states, says, agrees))

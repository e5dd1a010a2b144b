"""Oracles of what changes a model's own matrices: a LoRA beside them, clusters in their place."""

from __future__ import annotations

from copy import deepcopy

import torch

from tests.objectives.case import BATCH, COUNT, Case, disturbed, frozen, head
from tests.objectives.naive import cross_entropy, predicting, residuals_of
from tests.objectives.rivals import RIVAL, rival_loss
from tests.objectives.whole import next_token, top_of
from vivace.adapters.pool.training import SoftPrompt, SoftPromptObjective
from vivace.adapters.training import LoraObjective, LoraWeights
from vivace.core.low_rank import PROJECTIONS, site_shapes
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.kernels.coded import PaletteCodes
from vivace.palette.rounding import round_matrix
from vivace.palette.statistics import matrices
from vivace.palette.training import ClusteringObjective, PaletteObjective, with_clusters, with_entries


def lora() -> Case:
    """Factors of every matrix, on rows that all carry them."""
    model = frozen()
    shapes = site_shapes(model.config, range(model.config.num_layers), dict.fromkeys(PROJECTIONS, 3))
    weights = disturbed(LoraWeights(shapes, 0.5), 0.05)

    def oracle() -> float:
        changed = merged(model, weights)
        return next_token(changed, top_of(changed))

    return Case(model, LoraObjective(model, weights, rows=5), oracle)


def soft_prompt() -> Case:
    """Embeddings in front of every text, which are not scored themselves."""
    model = frozen()
    rows = disturbed(SoftPrompt(torch.zeros(3, model.config.width)), 0.5)

    def oracle() -> float:
        losses = []
        for t, at, token in predicting(BATCH):
            text = BATCH.tokens[t]
            h = torch.cat((rows.embeddings, model.embed(text, Step.dense(1, len(text)))))
            top = model.run(h, Step.dense(1, len(h)))
            losses.append(cross_entropy(head(model, top[len(rows.embeddings) + at]), token))
        return float(sum(losses) / len(losses))

    return Case(model, SoftPromptObjective(model, rows, rows=5), oracle)


def merged(model: Decoder, weights: LoraWeights) -> Decoder:
    """A decoder whose matrices have the products of the factors in them."""
    changed = deepcopy(model)
    c = changed.config
    keys = c.num_kv_heads * c.head_dim
    first = {"k": c.num_heads * c.head_dim, "v": c.num_heads * c.head_dim + keys, "up": c.ffn_width}
    with torch.no_grad():
        for (layer, name), (down, up) in weights.factors().items():
            feed, attention = changed.layers[layer].feed_forward, changed.layers[layer]
            matrix = {"o": attention.o, "down": feed.down, "gate": feed.up, "up": feed.up}.get(name, attention.qkv)
            rows = slice(first.get(name, 0), first.get(name, 0) + len(up))
            matrix.weight[rows] += 0.5 * up @ down  # type: ignore[index,operator]
    return changed


def palette(*, trains_entries: bool = False) -> Case:
    """Matrices of eight values each sixteen outputs; without gradients they are what is stored."""
    model = frozen()
    stored = {name: part.weight.detach() for name, part in matrices(model).items()}
    codes = {name: round_matrix(weight, 3, "rtn", has_scales=False) for name, weight in stored.items()}
    known = {name: each for name, each in codes.items() if isinstance(each, PaletteCodes)}
    student, rounded = deepcopy(model), deepcopy(model)
    objective: PaletteObjective
    if trains_entries:
        objective = PaletteObjective(student, with_entries(student, known), RIVAL)
    else:
        parts = with_clusters(student, stored, known, rounds=1)
        objective = ClusteringObjective(student, parts, RIVAL, (0.1, 0.1), 1)

    def oracle() -> float:
        with torch.no_grad():
            for name, part in matrices(rounded).items():
                part.weight.copy_(known[name].dense())
        total = 0.0
        for text, at, token in predicting(BATCH):
            truth, guess = (residuals_of(each, BATCH.tokens[text])[0][-1][at] for each in (model, rounded))
            total += rival_loss(head(model, truth), head(rounded, guess), token)
        return total / COUNT

    return Case(model, objective, oracle)

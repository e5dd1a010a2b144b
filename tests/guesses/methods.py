"""Every drafter with weights, in every shape of draft, with random weights and the objective that would train them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.decode.tiny_decoders import VOCAB, build
from tests.guesses.listening import Ears, Listening
from tests.guesses.trained import OfBlocks, OfFeatures, OfHeads, OfPaths, OfStreams, OfStudent, OfVerified, Trained
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.lookup import PromptLookup
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig
from vivace.methods.draft.objective import StudentObjective
from vivace.methods.eagle.drafter import Eagle, EagleConfig, EagleLayer
from vivace.methods.eagle.objective import EagleLoss, EagleObjective
from vivace.methods.early_exit.drafter import Exit, ExitConfig, exit_drafter
from vivace.methods.early_exit.objective import ExitObjective
from vivace.methods.medusa.drafter import Medusa, MedusaConfig, MedusaHeads
from vivace.methods.medusa.objective import MedusaLoss, MedusaObjective
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.drafter import self_speculation
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.residual import Accelerator
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.methods.multistream.streams import Streams
from vivace.methods.uno.drafter import Uno, UnoConfig, UnoDeltas
from vivace.methods.uno.objective import UnoLoss, UnoObjective
from vivace.train.distillation import DistillationLoss
from vivace.train.supervised import SupervisedObjective, Supervision

LOSS = DistillationLoss()


@dataclass(frozen=True)
class Method:
    """How a drafter comes about from untrained weights, and what training would make of the same."""

    weights: Callable[[Decoder], nn.Module]
    drafter: Callable[[Decoder, Any], Drafter]
    trained: Callable[[Decoder, Any, Ears], Trained]
    by_level: bool = False
    repeats: bool = False
    noise: float = 0.1

    def heard(self, drafter: Drafter, ears: Ears) -> Listening:
        """A drafter of this kind, heard."""
        return Listening(drafter, ears, self.by_level, self.repeats)


def make(method: Method, target: Decoder, exact: Decoder, ears: Ears) -> tuple[Drafter, Trained]:
    """A drafter for ``target``, and its weights in training on ``exact``, which is the same model in float32."""
    torch.manual_seed(5)
    weights = method.weights(exact)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn_like(parameter) * method.noise)
    weights = weights.to(target.dtype).requires_grad_(False)
    twin = deepcopy(weights).float()
    return method.drafter(target, weights), method.trained(exact, twin, ears)


def multirate(plan: DraftPlan, *, lookup: bool = False, **fields: Any) -> Method:
    config = MultirateConfig(**{"exit_layer": 3, "rank": 4, "bottleneck": 8, **fields})
    oracle = OfVerified if config.feedback or config.reach else OfPaths
    return Method(
        lambda model: Accelerator(config, model.config),
        lambda model, weights: self_speculation(model, weights, plan, lookup=PromptLookup() if lookup else None),
        lambda model, weights, ears: oracle(model, MultirateObjective(weights, MultirateLoss()), ears),
        repeats=lookup,
    )


def multistream(plan: StreamPlan, **fields: Any) -> Method:
    config = MultistreamConfig(**{"streams": 3, "insertion_layer": 3, "rank": 4, "bottleneck": 8, **fields})
    return Method(
        lambda model: Streams(config, model.config),
        lambda model, weights: StreamDrafter(model, weights, plan),
        lambda model, weights, ears: OfStreams(
            model, MultistreamObjective(weights, MultistreamLoss(pruner=0.0), attach=plan.attach), ears
        ),
        by_level=True,
    )


def medusa(plan: TreePlan, **fields: Any) -> Method:
    def heads(model: Decoder) -> MedusaHeads:
        made = MedusaHeads(MedusaConfig(len(plan.widths), **fields), model.config)
        made.start_from(model)
        return made

    return Method(
        heads,
        lambda model, weights: Medusa(model, weights, plan),
        lambda model, weights, ears: OfHeads(model, MedusaObjective(weights, MedusaLoss()), ears),
        by_level=True,
        noise=0.02,
    )


def eagle(plan: DraftPlan, **fields: Any) -> Method:
    return Method(
        lambda model: EagleLayer(EagleConfig(**fields), model.config),
        lambda model, weights: Eagle(model, weights, plan),
        lambda model, weights, ears: OfFeatures(model, EagleObjective(weights, EagleLoss(noise=0.0)), ears, weights),
    )


def deed(plan: DraftPlan, gate: int = 3) -> Method:
    return Method(
        lambda model: Exit(ExitConfig(gate, 8), model.config),
        lambda model, weights: exit_drafter(model, weights, plan),
        lambda model, weights, ears: OfPaths(model, ExitObjective(weights, LOSS), ears),
    )


def layerskip(plan: DraftPlan, gate: int = 3) -> Method:
    return Method(
        lambda model: Exit(ExitConfig(gate), model.config),
        lambda model, weights: exit_drafter(model, weights, plan),
        lambda model, weights, ears: OfPaths(model, SupervisedObjective(model, Supervision((gate,))), ears),
    )


def uno(plan: TreePlan, block: int = 4) -> Method:
    return Method(
        lambda model: UnoDeltas(UnoConfig(block, 4), model.config),
        lambda model, weights: Uno(model, weights, plan),
        lambda model, weights, ears: OfBlocks(model, UnoObjective(weights, UnoLoss(blocks=10_000)), ears),
        by_level=True,
    )


def draft(count: int) -> Method:
    return Method(
        lambda model: build(torch.float32, num_layers=2, seed=9),
        lambda model, weights: DraftModel(weights, VOCAB, DraftModelConfig(count)),
        lambda model, weights, ears: OfStudent(model, StudentObjective(weights, LOSS), ears),
        noise=0.0,
    )


CHAIN, TREE = DraftPlan.chain(3), DraftPlan((2, 2, 1))
KNOWING = {"feedback": True, "reach": (4, 5)}
METHODS: dict[str, Method] = {
    "multirate chain": multirate(CHAIN),
    "multirate tree": multirate(TREE),
    "multirate lite": multirate(TREE, mode="lite"),
    "multirate knowing chain": multirate(CHAIN, **KNOWING),
    "multirate knowing tree": multirate(TREE, **KNOWING),
    "multirate unsure": multirate(DraftPlan((1, 1, 1), 0.02)),
    "multirate+lookup": multirate(CHAIN, lookup=True),
    "multistream every chain": multistream(StreamPlan((1, 1, 1), "every")),
    "multistream every tree": multistream(StreamPlan((2, 1, 1), "every")),
    "multistream kept chain": multistream(StreamPlan((1, 1, 1), "kept")),
    "multistream kept tree": multistream(StreamPlan((2, 2, 1), "kept")),
    "multistream kept fewer": multistream(StreamPlan((1, 1), "kept")),
    "multistream feedback chain": multistream(StreamPlan((1, 1, 1), "kept"), feedback=True),
    "multistream feedback on every node": multistream(StreamPlan((2, 1, 1), "every"), feedback=True),
    "multistream feedback tree": multistream(StreamPlan((2, 2, 1), "kept"), feedback=True),
    "multistream rotation": multistream(StreamPlan((2, 1, 1), "every"), identifier="rotation"),
    "medusa chain": medusa(TreePlan((1, 1, 1))),
    "medusa tree": medusa(TreePlan((3, 2, 1))),
    "medusa sparse": medusa(TreePlan((3, 3, 2), 9)),
    "medusa shared": medusa(TreePlan((2, 2)), own_output=False),
    "eagle chain": eagle(CHAIN),
    "eagle tree": eagle(TREE),
    "eagle narrow": eagle(TREE, ffn_width=24),
    "deed chain": deed(CHAIN),
    "deed tree": deed(TREE),
    "layerskip chain": layerskip(CHAIN),
    "layerskip tree": layerskip(TREE),
    "uno chain": uno(TreePlan((1, 1, 1, 1))),
    "uno tree": uno(TreePlan((2, 2, 1))),
    "uno sparse": uno(TreePlan((1, 3, 2, 2), 8)),
    "draft": draft(3),
}

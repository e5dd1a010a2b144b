"""Specs of other people's methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.decode.spec import DRAFTS_NOTHING, ConfigReader, MethodContext, MethodSpec, Stored, with_length

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _widen_low_rank(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    from vivace.checkpoint.widen import widen_low_rank

    return widen_low_rank(name, value, config, k)


def _shapes(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import draft_plans

    return draft_plans(longest)


# Medusa


def _medusa(context: MethodContext) -> Drafter:
    from vivace.baselines.medusa import Medusa

    weights, plan = context.trained()
    return Medusa(context.model, weights, with_length(plan, context.length))


def _heads() -> Stored:
    from vivace.baselines.medusa import MedusaConfig, MedusaHeads, MedusaPlan
    from vivace.baselines.objectives import MedusaObjective

    return Stored(MedusaConfig, MedusaPlan, MedusaHeads, "heads", objective=MedusaObjective)


def _medusa_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.baselines.medusa import MedusaPlan
    from vivace.decode.shallow import DraftPlan, draft_plans

    heads = config().get("heads", longest)
    plans = draft_plans(longest)
    fit = [plan.widths for plan in plans if len(plan.widths) <= heads and plan == DraftPlan(plan.widths)]
    sparse = [MedusaPlan((5, 4, 3, 2, 2, 1, 1, 1)[:heads], nodes) for nodes in (4, 8, 12, 16, 24)]
    return [*map(MedusaPlan, fit), *sparse]


def _widen_medusa(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of Medusa's heads, (heads, out, E)."""
    return (value.repeat(1, 1, k) if name == "output" else value.repeat(1, k, k)) / k


MEDUSA = MethodSpec(
    name="medusa",
    summary="heads on the last residual draft a tree",
    make=_medusa,
    adapter="medusa",
    stored=_heads,
    training="beside",
    plans=_medusa_plans,
    widen=_widen_medusa,
)


# EAGLE


def _eagle(context: MethodContext) -> Drafter:
    from vivace.baselines.eagle import Eagle

    weights, plan = context.trained()
    return Eagle(context.model, weights, with_length(plan, context.length))


def _feature_drafter() -> Stored:
    from vivace.baselines.eagle import EagleConfig, EagleLayer
    from vivace.baselines.objectives import EagleObjective
    from vivace.decode.shallow import DraftPlan

    return Stored(EagleConfig, DraftPlan, EagleLayer, "a feature drafter", objective=EagleObjective)


def _eagle_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.decode.shallow import draft_plans

    return [plan for plan in draft_plans(longest) if plan.weights == "bf16"]


def _widen_eagle(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """One tensor of a feature drafter: what joins a feature and an embedding, and a layer as the model's are."""
    import torch

    from vivace.checkpoint.widen import widen_parameter

    if name == "join":
        return torch.cat([half.repeat(k, k) / k for half in value.chunk(2, 1)], 1)
    return widen_parameter(name.removeprefix("body."), value, config, k)


EAGLE = MethodSpec(
    name="eagle",
    summary="a one-layer feature drafter",
    make=_eagle,
    adapter="eagle",
    stored=_feature_drafter,
    training="beside",
    plans=_eagle_plans,
    widen=_widen_eagle,
)


# DEED and LayerSkip


def _deed(context: MethodContext) -> Drafter:
    from vivace.baselines.exits import exit_drafter

    weights, plan = context.trained()
    return exit_drafter(context.model, weights, with_length(plan, context.length))


def _exit_with_adapter() -> Stored:
    from vivace.baselines.exits import Exit, ExitConfig
    from vivace.baselines.objectives import ExitObjective
    from vivace.decode.shallow import DraftPlan

    return Stored(ExitConfig, DraftPlan, Exit, "an exit with an adaptation module", objective=ExitObjective)


DEED = MethodSpec(
    name="deed",
    summary="early exit with an adapter drafts",
    make=_deed,
    adapter="deed",
    stored=_exit_with_adapter,
    training="beside",
    plans=_shapes,
    widen=_widen_low_rank,
)


def _layerskip(context: MethodContext) -> Drafter:
    from vivace.baselines.exits import Exit, exit_drafter
    from vivace.decode.shallow import DraftPlan

    config, plan = context.planned(DraftPlan())
    return exit_drafter(context.model, Exit(config, context.model.config), with_length(plan, context.length))


def _bare_exit() -> Stored:
    from vivace.baselines.exits import ExitConfig
    from vivace.decode.shallow import DraftPlan

    def a_quarter_of_the_way_up(model: ModelConfig) -> ExitConfig:
        return ExitConfig(max(1, model.num_layers // 4))

    return Stored(ExitConfig, DraftPlan, None, "an exit", default_config=a_quarter_of_the_way_up)


LAYERSKIP = MethodSpec(
    name="layerskip",
    summary="the lower layers of a model trained for it draft",
    make=_layerskip,
    stored=_bare_exit,
    training="whole",
    plans=_shapes,
)


# Lookahead


def _lookahead(context: MethodContext) -> Drafter:
    from dataclasses import replace

    from vivace.baselines.lookahead import Lookahead, LookaheadPlan

    _, plan = context.planned(LookaheadPlan())
    return Lookahead(context.model, plan if context.length is None else replace(plan, ngram=context.length + 1))


def _three_numbers() -> Stored:
    from vivace.baselines.lookahead import LookaheadPlan

    return Stored(dict, LookaheadPlan, None, "a plan")


def _lookahead_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.baselines.lookahead import LookaheadPlan

    sizes = ((3, 3), (5, 5), (7, 3))
    return [LookaheadPlan(n, window, guesses) for n in range(3, min(6, longest + 2)) for window, guesses in sizes]


LOOKAHEAD = MethodSpec(
    name="lookahead",
    summary="Jacobi windows fill an n-gram pool",
    make=_lookahead,
    stored=_three_numbers,
    plans=_lookahead_plans,
)


# UNO


def _uno(context: MethodContext) -> Drafter:
    from vivace.baselines.uno import Uno

    weights, plan = context.trained()
    return Uno(context.model, weights, with_length(plan, context.length))


def _block_terms() -> Stored:
    from vivace.baselines.medusa import MedusaPlan
    from vivace.baselines.objectives import UnoObjective
    from vivace.baselines.uno import UnoConfig, UnoTerms

    return Stored(UnoConfig, MedusaPlan, UnoTerms, "terms that draft a block", objective=UnoObjective)


def _uno_plans(config: ConfigReader, longest: int) -> Sequence[Any]:
    from vivace.baselines.medusa import MedusaPlan

    block = min(config().get("block", longest), longest)
    chains = [MedusaPlan((1,) * length) for length in range(1, block + 1)]
    trees = [MedusaPlan((1, 4, 3, 2, 2, *[2] * block)[:block], nodes) for nodes in (4, 8, 12, 16, 24)]
    return [*chains, *trees]


UNO = MethodSpec(
    name="uno",
    summary="the model with low-rank terms drafts a block in one pass",
    make=_uno,
    adapter="uno",
    stored=_block_terms,
    training="beside",
    plans=_uno_plans,
    widen=_widen_low_rank,
)


# CALM, LITE, SkipDecode and Mixture-of-Depths: lossy


def _calm(context: MethodContext) -> Drafter:
    from vivace.baselines.confidence import ConfidentDepth

    return ConfidentDepth("calm", *context.trained(), context.quality)


def _lite(context: MethodContext) -> Drafter:
    from vivace.baselines.confidence import ConfidentDepth

    return ConfidentDepth("lite", *context.trained(), context.quality)


def _thresholds() -> Stored:
    from vivace.baselines.confidence import Confidence, ConfidenceConfig, ConfidencePlan

    return Stored(ConfidenceConfig, ConfidencePlan, Confidence, "thresholds", is_float32=True)


CALM = MethodSpec(
    name="calm",
    summary="leave early by confidence",
    make=_calm,
    adapter="calm",
    stored=_thresholds,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    has_quality=True,
    training="beside",
)
LITE = MethodSpec(
    name="lite",
    summary="leave early by a fine-tuned model's own probability",
    make=_lite,
    adapter="lite",
    stored=_thresholds,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    has_quality=True,
    training="beside",
)


def _skipdecode(context: MethodContext) -> Drafter:
    from vivace.baselines.skipdecode import SkipDecode

    _, plan = context.planned(None)
    return SkipDecode(context.model) if plan is None else SkipDecode(context.model, plan)


def _schedule() -> Stored:
    from vivace.baselines.skipdecode import SkipPlan

    return Stored(dict, SkipPlan, None, "a schedule")


SKIPDECODE = MethodSpec(
    name="skipdecode",
    summary="skip middle layers by position",
    make=_skipdecode,
    stored=_schedule,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    training="whole",
)


def _mod(context: MethodContext) -> Drafter:
    from vivace.baselines.mod import MixtureOfDepths

    return MixtureOfDepths(*context.trained())


def _depth_routers() -> Stored:
    from vivace.baselines.mod import ModConfig, ModPlan, Routers

    what = "routers, and a model that was fine-tuned for them,"
    return Stored(ModConfig, ModPlan, Routers, what, is_float32=True)


MOD = MethodSpec(
    name="mod",
    summary="routers let some tokens through every second layer (Mixture-of-Depths)",
    make=_mod,
    adapter="mod",
    stored=_depth_routers,
    lossless=False,
    no_length=DRAFTS_NOTHING,
    training="whole",
)

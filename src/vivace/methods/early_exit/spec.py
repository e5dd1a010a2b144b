"""Specs of drafts read at an early exit: DEED, with an adaptation module, and LayerSkip, without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import (
    MethodContext,
    MethodSpec,
    Stored,
    draft_head,
    draft_shapes,
    widen_low_rank,
    with_length,
)

if TYPE_CHECKING:
    from vivace.core.config import ModelConfig
    from vivace.core.seams import Drafter


def _deed(context: MethodContext) -> Drafter:
    from vivace.methods.early_exit.drafter import exit_drafter

    weights, plan = context.trained()
    return exit_drafter(context.model, weights, with_length(plan, context.length), draft_head(context, plan))


def _exit_with_adapter() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.early_exit.drafter import Exit, ExitConfig
    from vivace.methods.early_exit.objective import ExitObjective

    return Stored(
        ExitConfig,
        DraftPlan,
        Exit,
        "an exit with an adaptation module",
        objective=ExitObjective,
        trained_config=lambda: ExitConfig(bottleneck=256),
    )


DEED = MethodSpec(
    name="deed",
    summary="an early exit with an adaptation module drafts",
    make=_deed,
    adapter="deed",
    stored=_exit_with_adapter,
    training="beside",
    plans=draft_shapes,
    widen=widen_low_rank,
)


def _layerskip(context: MethodContext) -> Drafter:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.early_exit.drafter import Exit, exit_drafter

    config, plan = context.planned(DraftPlan())
    exit_, plan = Exit(config, context.model.config), with_length(plan, context.length)
    return exit_drafter(context.model, exit_, plan, draft_head(context, plan))


def _bare_exit() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.early_exit.drafter import ExitConfig

    def a_quarter_of_the_way_up(model: ModelConfig) -> ExitConfig:
        return ExitConfig(max(1, model.num_layers // 4))

    return Stored(ExitConfig, DraftPlan, None, "an exit", default_config=a_quarter_of_the_way_up)


LAYERSKIP = MethodSpec(
    name="layerskip",
    summary="the lower layers of a model trained for it draft",
    make=_layerskip,
    stored=_bare_exit,
    training="whole",
    plans=draft_shapes,
)

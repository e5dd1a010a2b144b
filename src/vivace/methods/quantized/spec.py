"""Specs of drafts by the model itself with quantized weights, alone and after prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivace.methods.spec import ConfigReader, MethodContext, MethodSpec, Stored, draft_head, with_length

if TYPE_CHECKING:
    from vivace.core.model import Decoder
    from vivace.core.seams import Drafter
    from vivace.decode.lookup import PromptLookup
    from vivace.decode.shallow import DraftPlan


def _plan(length: int, min_confidence: float = 0.0) -> DraftPlan:
    from vivace.decode.shallow import DraftPlan

    return DraftPlan((1,) * length, min_confidence, "q4")


def _quantized(context: MethodContext, lookup: PromptLookup | None = None) -> Drafter:
    from vivace.methods.quantized.drafter import OwnGuess, QuantizedDrafter
    from vivace.methods.quantized.stored import copies_of

    plan = with_length(context.planned(_plan(3))[1], context.length)
    guess = context.shared(
        "quantized guess", lambda: OwnGuess(context.model, copies_of(context.model, context.tensors()))
    )
    return QuantizedDrafter(context.model, guess, plan, draft_head(context, plan), lookup=lookup)


def _quantized_with_lookup(context: MethodContext) -> Drafter:
    from vivace.decode.lookup import PromptLookup
    from vivace.methods.quantized.drafter import LOOKUP

    length = LOOKUP.num_draft_tokens if context.length is None else context.length
    return _quantized(context, PromptLookup(replace(LOOKUP, num_draft_tokens=length)))


def _why_not(model: Decoder) -> str | None:
    if model.backend.chain is None or not model.backend.chain.quantizes:
        return "it drafts in native calls, which need bfloat16 weights in memory and kernels of this project"
    if model.backend.weights not in ("bf16", "exact12"):
        return f"its weights are quantized already, to {model.backend.weights}"
    return None


def _own_layers() -> Stored:
    from vivace.decode.shallow import DraftPlan
    from vivace.methods.quantized.drafter import QuantizedConfig

    return Stored(
        QuantizedConfig,
        DraftPlan,
        None,
        "a plan of quantized drafts",
        default_config=lambda model: QuantizedConfig(),
        trained_plan=lambda: _plan(3),
    )


def _chains(config: ConfigReader, longest: int) -> Sequence[Any]:
    lengths = range(1, longest + 1)
    unsure = [_plan(length, sure) for length in lengths if length in (3, 4, 6, 8) for sure in (0.2, 0.3, 0.5)]
    return [*(_plan(length) for length in lengths), *unsure]


QUANTIZED = MethodSpec(
    name="quantized",
    summary="the model itself, with weights of four bits, drafts",
    make=_quantized,
    stored=_own_layers,
    why_not=_why_not,
    training="beside",
    plans=_chains,
)

QUANTIZED_LOOKUP = MethodSpec(
    name="quantized+lookup",
    summary="prompt lookup where the text repeats itself, else the model with weights of four bits",
    make=_quantized_with_lookup,
    adapter="quantized",
    why_not=_why_not,
    is_tried_by_auto=True,
)

"""``MethodSpec``: everything that lists of methods know about one method; each method's folder has one.

The command line, the server's catalogue, training, tuning, widening, ``doctor`` and the docs read nothing else about a
method. Importing a spec does not import torch: its functions import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.draft_head import DraftHead
    from vivace.core.model import Decoder
    from vivace.core.seams import Drafter

T = TypeVar("T")
Widen = Callable[[str, "Tensor", "ModelConfig", int], "Tensor"]
"""(name, tensor, narrow model, factor) -> the tensor for a model that many times wider, which computes the same."""


ConfigReader = Callable[[], Mapping[str, Any]]
"""Returns the config with which a method's weights were trained."""


class Plan(Protocol):
    """How a method drafts: a frozen dataclass that is stored as JSON beside the weights."""

    @property
    def label(self) -> str:
        """Return a short description of the plan, such as ``chain 4`` or ``tree 2-2-1``."""
        ...


@dataclass(frozen=True)
class Stored:
    """How the files of a method are read, and how its weights are trained."""

    config: type[Any]
    """Config of the weights: a frozen dataclass."""
    plan: type[Any]
    """How the weights are used: a frozen dataclass."""
    weights: Callable[[Any, ModelConfig], Any] | None
    """Makes untrained weights from ``config``; their ``tensors()`` names what a file holds. None where a
    plan is all."""
    what: str
    """What the weights are called in messages."""
    is_float32: bool = False
    """Whether weights stay in float32 on a model of fewer bits."""
    default_config: Callable[[ModelConfig], Any] | None = None
    """Config of a method without weights, for when none is stored."""
    objective: Callable[[Any, Any, DraftHead | None], Any] | None = None
    """(weights, loss settings, what reads guesses) -> the training objective on a frozen model, for methods that
    the common recipe trains."""
    loss: type[Any] | None = None
    """Settings of that objective, a frozen dataclass; None stands for plain distillation."""
    trained_config: Callable[[], Any] | None = None
    """Config that the common recipe trains unless told otherwise; None stands for the default of ``config``."""
    trained_plan: Callable[[], Any] | None = None
    """Plan that is saved unless told otherwise; None stands for the default of ``plan``."""
    deepest: str | None = None
    """Field of ``config`` that says how many guesses in a row the weights make at most; None has no limit."""


class MethodContext(Protocol):
    """What a drafter is made from: the model, the weights trained for it, and the caller's options."""

    @property
    def model(self) -> Decoder:
        """Return the target."""
        ...

    @property
    def length(self) -> int | None:
        """Return the number of guesses per step asked for; None leaves it to the method or its plan."""
        ...

    @property
    def quality(self) -> float | None:
        """Return the agreement with the whole model asked for; None leaves it to the method."""
        ...

    @property
    def kind(self) -> str:
        """Return the name of the method whose weights are used."""
        ...

    def trained(self) -> tuple[Any, Any]:
        """Return the method's weights, read and checked once, and the plan asked for or else stored with them.

        Raises:
            NotFoundError: there are none; the message names the command that trains them.
        """
        ...

    def planned(self, default: Any) -> tuple[Any, Any]:
        """Return (config, plan) of a method without weights: those asked for, else those stored, else the defaults."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what is stored beside the plan of a method that can do without; empty where there is nothing."""
        ...

    def vocabulary(self, size: int) -> Tensor | None:
        """Return the tokens of the method's draft vocabulary that may be guessed, (n,) ascending; None for size 0.

        Raises:
            NotFoundError: there is none beside the method's weights.
            MismatchError: it is another model's.
        """
        ...

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """Return an object that several methods of this model share, made by the first that asks for it."""
        ...

    def draft_model(self) -> Decoder:
        """Return the second, smaller model.

        Raises:
            NotFoundError: none was named and none lies beside the model.
        """
        ...

    def drafters(self) -> tuple[Drafter, Sequence[Drafter]]:
        """Return the drafter of plain decoding, and those among which ``auto`` may choose here."""
        ...

    def place(self) -> str | None:
        """Return under which name measurements of this model on this machine are kept; None keeps none."""
        ...

    def fingerprint(self, method: str) -> str:
        """Return what tells the weights that a method has beside the model's from others; empty where it has none."""
        ...


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A decoding method as lists of methods know it."""

    name: str
    """The name that users write in the shell, in Python and in JSON."""
    summary: str
    """What the method does, in half a sentence."""
    make: Callable[[MethodContext], Drafter]
    """Makes the method's drafter."""
    adapter: str | None = None
    """Kind of the trained weights it needs, which is the name of the method they were trained for; None needs none."""
    stored: Callable[[], Stored] | None = None
    """Describes the files of its weights, or of its plan where it has no weights."""
    lossless: bool = True
    """Whether the text is the one of plain decoding (greedy) or has its distribution (sampling)."""
    no_length: str | None = None
    """Why it takes no number of guesses; None where it takes one."""
    has_quality: bool = False
    """Whether tokens exit early, at a stated agreement with the whole model."""
    needs_draft_model: bool = False
    """Whether a second, smaller model drafts."""
    why_not: Callable[[Decoder], str | None] = lambda model: None
    """Returns why it cannot run on a model, or None where it can."""
    runs_on_ranks: bool = False
    """Whether it drafts without the target's layers, so that these may be spread over several machines."""
    is_tried_by_auto: bool = False
    """Whether ``auto`` measures it beside plain decoding where it can run."""
    training: Literal["beside", "whole"] | None = None
    """What ``vivace train NAME`` trains: weights beside a frozen model, or all weights of a model."""
    plans: Callable[[ConfigReader, int], Sequence[Any]] | None = None
    """(reader of the weights' config, longest draft) -> plans that ``vivace tune`` compares; None has
    nothing to tune."""
    keeps_plan: bool = True
    """Whether a plan may be stored for it, beside its weights or, where it has none, in a folder of its own."""
    widen: Widen | None = None
    """How its weights are widened with the model; None where they cannot be."""
    has_twin: Callable[[Mapping[str, Any]], bool] = lambda config: True
    """Whether weights of this config can be widened."""

    def reason_against(self, model: Decoder) -> str | None:
        """Return why the method cannot run on a model, or None where it can."""
        if model.backend.num_ranks > 1 and not self.runs_on_ranks:
            return "it is for one machine; plain, lookup and draft run on several ranks"
        return self.why_not(model)

    @property
    def is_tuned(self) -> bool:
        """Return whether its drafts have a shape that ``vivace tune`` can choose."""
        return self.plans is not None


DRAFTS_NOTHING = "drafts nothing"


def with_length(plan: T, length: int | None) -> T:
    """Return a plan with ``widths`` as a chain of ``length`` guesses; unchanged where ``length`` is None."""
    return plan if length is None else replace(plan, widths=(1,) * length)  # type: ignore[type-var]


def draft_head(context: MethodContext, plan: Any) -> DraftHead:
    """Return what the guesses of a plan are read with, made once for all plans with the same vocabulary."""
    from vivace.core.draft_head import DraftHead

    ids = context.vocabulary(plan.vocabulary)
    key = f"draft head of {context.kind}, {plan.vocabulary} tokens"
    return context.shared(key, lambda: DraftHead(context.model, ids))


def widen_low_rank(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Return one tensor of a low-rank pair for a model ``k`` times as wide (``MethodSpec.widen``)."""
    from vivace.checkpoint.widen import widen_low_rank as widened

    return widened(name, value, config, k)


def draft_shapes(config: ConfigReader, longest: int) -> Sequence[Any]:
    """Return the drafts of lower layers that ``vivace tune`` tries, whatever the config of the weights."""
    from vivace.decode.shallow import draft_plans

    return draft_plans(longest)

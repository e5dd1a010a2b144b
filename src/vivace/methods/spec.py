"""What every list of methods knows about one way to decode: a ``MethodSpec``, one in each technique's folder.

The command line, the server's catalogue, training, tuning, widening, ``doctor`` and the docs read nothing else about a
method. Importing a spec imports no torch: its functions load what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.core.config import ModelConfig
    from vivace.core.model import Decoder
    from vivace.core.seams import Drafter

T = TypeVar("T")
Widen = Callable[[str, "Tensor", "ModelConfig", int], "Tensor"]
"""(name, tensor, narrow model, factor) -> the tensor for a model that is so many times wider and computes the same."""


ConfigReader = Callable[[], Mapping[str, Any]]
"""Reads the config that a method's weights were trained with."""


class Plan(Protocol):
    """How a method drafts: a frozen dataclass that is stored as JSON beside the weights."""

    @property
    def label(self) -> str:
        """The plan in a few characters, such as ``chain 4`` or ``tree 2-2-1``."""
        ...


@dataclass(frozen=True)
class Stored:
    """What the files of a method are read as."""

    config: type[Any]
    """Of the weights: a frozen dataclass."""
    plan: type[Any]
    """How they are used: a frozen dataclass."""
    weights: Callable[[Any, ModelConfig], Any] | None
    """Makes untrained weights from ``config``, which know their ``tensors()``; None where the files are a plan."""
    what: str
    """What the weights are, in messages."""
    is_float32: bool = False
    """Whether weights stay in float32 on a model of fewer bits."""
    default_config: Callable[[ModelConfig], Any] | None = None
    """Config of a method without weights where none is stored."""
    objective: Callable[[Any, Any], Any] | None = None
    """(weights, loss settings) -> what training beside the frozen model lowers, where the common recipe fits."""
    loss: type[Any] | None = None
    """Settings of that objective: a frozen dataclass; None is plain distillation."""
    trained_config: Callable[[], Any] | None = None
    """Config that the common recipe trains unless told otherwise; None is the default of ``config``."""
    trained_plan: Callable[[], Any] | None = None
    """Plan that the common recipe saves unless told otherwise; None is the default of ``plan``."""


class MethodContext(Protocol):
    """What a drafter is made from: the model, the weights that were trained for it, and what was asked for."""

    @property
    def model(self) -> Decoder:
        """The target."""
        ...

    @property
    def length(self) -> int | None:
        """Guesses per step that were asked for; None is what the method or its plan says."""
        ...

    @property
    def quality(self) -> float | None:
        """Stated agreement with the whole model that was asked for; None is what the method says."""
        ...

    def trained(self) -> tuple[Any, Any]:
        """Weights of the method, read and checked once, and the plan that was asked for or is stored with them.

        Raises:
            NotFoundError: there are none; the command that trains them is named.
        """
        ...

    def planned(self, default: Any) -> tuple[Any, Any]:
        """(config, plan) of a method without weights: those that were asked for or stored, else the defaults."""
        ...

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """What several methods of this model have in common, made by the first that asks."""
        ...

    def draft_model(self) -> Decoder:
        """The second, smaller model.

        Raises:
            NotFoundError: none was named and none lies beside the model.
        """
        ...

    def drafters(self) -> tuple[Drafter, Sequence[Drafter]]:
        """The drafter of plain decoding, and those that ``auto`` may choose from here."""
        ...


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A way to decode."""

    name: str
    """As users write it: in the shell, in Python, in JSON."""
    summary: str
    """What it does, in half a sentence."""
    make: Callable[[MethodContext], Drafter]
    """Puts its drafter together."""
    adapter: str | None = None
    """Kind of trained weights it needs, which is the name of the method that they were trained for."""
    stored: Callable[[], Stored] | None = None
    """What the files of that kind are read as, or those of a plan without weights."""
    lossless: bool = True
    """The text is what plain decoding writes (greedy), or distributed as it is (sampling)."""
    no_length: str | None = None
    """Why it takes no number of guesses; None where it takes one."""
    has_quality: bool = False
    """Tokens leave early, at a stated agreement with the whole model."""
    needs_draft_model: bool = False
    """A second, smaller model drafts."""
    is_tried_by_auto: bool = False
    """``auto`` measures it beside plain decoding where it is ready."""
    training: Literal["beside", "whole"] | None = None
    """What ``vivace train NAME`` trains: weights beside a frozen model, or all weights of a model."""
    plans: Callable[[ConfigReader, int], Sequence[Any]] | None = None
    """(reads the weights' config, longest draft) -> plans that ``vivace tune`` lets play; None has no draft to tune."""
    keeps_plan: bool = True
    """A plan may be stored for it, beside its weights or, where it has none, in a folder of its own."""
    widen: Widen | None = None
    """How its weights are made as many times wider as the model; None where nobody knows how."""
    has_twin: Callable[[Mapping[str, Any]], bool] = lambda config: True
    """Whether weights of this config can be widened at all."""

    @property
    def is_tuned(self) -> bool:
        """Whether its draft has a shape to find."""
        return self.plans is not None


DRAFTS_NOTHING = "drafts nothing"


def with_length(plan: T, length: int | None) -> T:
    """A plan of ``widths`` as a chain of this many guesses; as it is where no number was asked for."""
    return plan if length is None else replace(plan, widths=(1,) * length)  # type: ignore[type-var]


def widen_low_rank(name: str, value: Tensor, config: ModelConfig, k: int) -> Tensor:
    """Return one tensor of a low-rank pair for a model ``k`` times as wide (``MethodSpec.widen``)."""
    from vivace.checkpoint.widen import widen_low_rank as widened

    return widened(name, value, config, k)


def draft_shapes(config: ConfigReader, longest: int) -> Sequence[Any]:
    """Return the drafts of lower layers that ``vivace tune`` tries, whatever the config of the weights."""
    from vivace.decode.shallow import draft_plans

    return draft_plans(longest)

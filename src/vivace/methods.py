"""The composition root of decoding: a method's name in, its drafter out.

With ``recipe.py``, which holds the table of names, the only place that names two techniques together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.baselines.confidence import Confidence, ConfidenceConfig, ConfidencePlan, ConfidentDepth
from vivace.baselines.exits import Exit, ExitConfig, exit_drafter
from vivace.baselines.kinds import KINDS, RivalPlan
from vivace.baselines.lookahead import Lookahead, LookaheadPlan
from vivace.baselines.mod import MixtureOfDepths, ModConfig, ModPlan, Routers
from vivace.baselines.skipdecode import SkipDecode, SkipPlan
from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.checkpoint.files import OWN_DRAFT
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.adaptive import Adaptive
from vivace.decode.draft_model import DraftModel, DraftModelConfig
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.plain import RunsAhead
from vivace.decode.session import DRAFT_SLACK
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, MismatchError, NotFoundError, UnsupportedError
from vivace.multirate.config import MultirateConfig
from vivace.multirate.drafter import AcceleratedGuess, drafter_by
from vivace.multirate.dynamic import DynamicConfig, DynamicDepth, DynamicPlan, DynamicWeights
from vivace.multirate.foreseeing import Foreseeing
from vivace.multirate.foresight import Foresight, ForesightConfig, ForesightPlan
from vivace.multirate.residual import Accelerator
from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.drafter import StreamDrafter
from vivace.multistream.streams import Streams
from vivace.recipe import METHODS, build, find_method

AnyPlan = DraftPlan | StreamPlan | RivalPlan
"""Shape of a draft, whoever makes it."""
LEAVING = ("dynamic", "calm", "lite")
"""Methods whose tokens leave early at a stated quality."""
UNDRAFTED = ("plain", "foresight", "skipdecode", "mod", *LEAVING)
"""Methods that draft nothing."""


PLANNED = ("layerskip", "lookahead", "skipdecode")
"""Methods without weights of their own, whose folder is a plan."""


@dataclass(frozen=True)
class Stored:
    """What the files of a kind of adapter are read as."""

    config: type[Any]
    plan: type[Any]
    weights: Callable[[Any, ModelConfig], Any]
    """Untrained ones, which know their ``tensors()``."""
    what: str
    """In messages."""
    is_float32: bool = False
    """Whether they stay so on a model of fewer bits."""


STORED: Mapping[str, Stored] = {
    "multirate": Stored(MultirateConfig, DraftPlan, Accelerator, "an accelerator"),
    "multistream": Stored(MultistreamConfig, StreamPlan, Streams, "speculative streams"),
    "foresight": Stored(ForesightConfig, ForesightPlan, Foresight, "foresight"),
    "dynamic": Stored(DynamicConfig, DynamicPlan, DynamicWeights, "gates and a router", is_float32=True),
    "calm": Stored(ConfidenceConfig, ConfidencePlan, Confidence, "thresholds", is_float32=True),
    "lite": Stored(ConfidenceConfig, ConfidencePlan, Confidence, "thresholds", is_float32=True),
    "mod": Stored(ModConfig, ModPlan, Routers, "routers, and a model that was fine-tuned for them,", is_float32=True),
    **{name: Stored(kind.config, kind.plan, kind.weights, kind.what) for name, kind in KINDS.items()},
}
"""By the name of the method."""


def plan_of(method: str, values: Mapping[str, Any]) -> AnyPlan:
    """A draft's shape as it was written down, such as ``{"widths": [1, 1, 1]}``.

    Raises:
        ConfigError: a method that drafts by no plan, or a key or value that its plan does not have.
    """
    kinds: dict[str, type[Any]] = {"draft": DraftPlan, "layerskip": DraftPlan, "lookahead": LookaheadPlan}
    adapter = find_method(method).adapter
    kind = kinds.get(method) if adapter is None else STORED[adapter].plan
    if kind is None or not issubclass(kind, AnyPlan):
        raise ConfigError(f"method {method} drafts by no plan; leave it out")
    made: AnyPlan = build(kind, values)
    return made


def read_adapter(kind: str, folder: Path, base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and weights of an adapter for a method.

    Args:
        kind: name of the method.
        folder: where it lies.
        base: ``base_hash`` of what it shall run on.

    Raises:
        CheckpointError: it is missing, broken or of another base.
        MismatchError: it is for another method.
    """
    written, tensors = load_adapter(folder, base)
    if written["kind"] != kind:
        raise MismatchError(f"{folder} is an adapter for {written['kind']}, not for {kind}")
    return written, tensors


def trained(
    folder: Path, written: Mapping[str, Any], tensors: Mapping[str, Tensor], model: ModelConfig
) -> tuple[Any, Any]:
    """Weights of an adapter as they were read, and the plan they are used by.

    Args:
        folder: where it lies.
        written: its ``config.json``.
        tensors: its weights.
        model: what they were trained on.

    Raises:
        MismatchError: the two files are not of one adapter.
    """
    stored = STORED[written["kind"]]
    weights = stored.weights(build(stored.config, written["config"]), model)
    expected = {name: value.shape for name, value in weights.tensors().items()}
    if expected != {name: value.shape for name, value in tensors.items()}:
        raise MismatchError(f"the weights in {folder} do not fit its config.json; train the adapter again")
    weights.load_state_dict(tensors, strict=False)  # a rival's borrowed layers are no tensors of the file
    return weights.requires_grad_(False), build(stored.plan, written["plan"])


def adapters_by_method(folders: Iterable[str | Path], base: Path | None) -> dict[str, Path]:
    """Adapter folders by the method they are for, as their own ``config.json`` says.

    Args:
        folders: what the user named.
        base: checkpoint they shall run on; None does not check.

    Raises:
        CheckpointError: one is missing, broken or of another base.
        ConfigError: two are for the same method.
        UnsupportedError: one is for a method that this version does not know.
    """
    kinds = {method.adapter for method in METHODS.values() if method.adapter}.union(PLANNED)
    found: dict[str, Path] = {}
    named = [Path(folder) for folder in folders]
    expected = base_hash(base) if named and base is not None else None
    for folder in named:
        kind = load_adapter(folder, expected)[0]["kind"]
        if kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise UnsupportedError(f"{folder} is an adapter for {kind!r}; this version uses adapters for {known}")
        if kind in found:
            raise ConfigError(f"{found[kind]} and {folder} are both adapters for {kind}; give one of them")
        found[kind] = folder
    return found


@dataclass(eq=False)
class Second:
    """A smaller model with the same tokens, read when it is first asked for."""

    open: Callable[[], Decoder]
    is_asked: bool
    """It was named, and does not only lie beside the model."""

    @cached_property
    def decoder(self) -> Decoder:
        """The model itself."""
        return self.open()


class Methods:
    """The drafters of one model, each made when first asked for and kept with what it has measured."""

    def __init__(
        self,
        model: Decoder,
        folder: Path | None,
        adapters: Mapping[str, Path],
        second: Second | None = None,
        plan: AnyPlan | None = None,
    ) -> None:
        """Make nothing yet.

        Args:
            model: the target.
            folder: its checkpoint, None for a model that only lives in memory (adapters cannot be checked then).
            adapters: adapter folders by method; others are looked for in ``<folder>/adapters/<method>``.
            second: for the method ``draft``.
            plan: shape of the drafts, instead of what the adapters say.
        """
        self.model = model
        self.folder = folder
        self.adapters = adapters
        self.second = second
        self.plan = plan
        self._drafters: dict[tuple[str, int | None, float | None], Drafter] = {}
        self._read: dict[str, tuple[Any, Any]] = {}

    def drafter(self, method: str, num_draft_tokens: int | None = None, quality: float | None = None) -> Drafter:
        """The drafter of a method, made once.

        Args:
            method: its name.
            num_draft_tokens: guesses per step; None is what the method or its adapter says.
            quality: stated agreement of a method that leaves early; None is what the method says.

        Raises:
            ConfigError: no such method, or a number of guesses or a quality for one that does not take it.
            NotFoundError: its weights are missing; names the command that trains them.
        """
        find_method(method)
        if quality is not None and method not in LEAVING:
            raise ConfigError(f"quality is {quality:g}, but method {method} does not leave early; leave it out")
        key = (method, num_draft_tokens, quality)
        if key not in self._drafters:
            self._drafters[key] = self._make(*key)
        return self._drafters[key]

    def planned(self, plan: AnyPlan) -> Methods:
        """The same methods and weights, drafting after another plan than the adapters'."""
        other = copy(self)
        other.plan, other._drafters = plan, {}
        return other

    def _make(self, method: str, length: int | None, quality: float | None) -> Drafter:
        if length is not None and method in (*UNDRAFTED, "auto"):
            why = "finds out how far to draft" if method == "auto" else "drafts nothing"
            raise ConfigError(f"num_draft_tokens is {length}, but method {method} {why}; leave it out")
        if length is not None and length >= DRAFT_SLACK:
            raise ConfigError(f"num_draft_tokens is {length}; a draft has at most {DRAFT_SLACK - 1} guesses")
        match method:
            case "plain":
                return RunsAhead(self.model)
            case "lookup":
                return _lookup(length)
            case "draft":
                return self._draft_model(length)
            case "multirate" | "multirate+lookup":
                lookup = _lookup(length) if method.endswith("lookup") else None
                return drafter_by(self._guess, self._draft_plan("multirate", length), lookup=lookup)
            case "multistream":
                return StreamDrafter(self.model, self._trained(method)[0], self._draft_plan(method, length))
            case "medusa" | "eagle" | "deed" | "uno":
                weights, plan = self._trained(method)[0], self._draft_plan(method, length)
                return KINDS[method].drafter(self.model, weights, plan)
            case "layerskip":
                return self._layerskip(length)
            case "lookahead":
                return self._lookahead(length)
            case "foresight":
                foresight, ahead = self._trained(method)
                return Foreseeing(foresight, ahead)
            case "skipdecode":
                return self._skipdecode()
            case "mod":
                return MixtureOfDepths(*self._trained(method))
            case "dynamic":
                exits, leaving = self._trained(method)
                exits.gates.to(self.model.dtype)
                return DynamicDepth(exits, leaving, quality)
            case "calm" | "lite":
                return ConfidentDepth(method, *self._trained(method), quality)
        return self._adaptive()

    def _adaptive(self) -> Adaptive:
        """What drafts best here, by the drafters of those methods themselves; a second model if it was named."""
        names = ["lookup", "multirate", *(["draft"] if self.second is not None and self.second.is_asked else [])]
        drafters = [self.drafter(name) for name in names if name in self.ready()]
        return Adaptive(drafters, plain=self.drafter("plain"))

    @cached_property
    def _guess(self) -> AcceleratedGuess:
        """Laid out once for all methods that draft with multirate."""
        return AcceleratedGuess(self.model, self._trained("multirate")[0])

    def _draft_plan(self, kind: str, length: int | None) -> Any:
        """The plan that was asked for or is stored; a chain where a number of guesses was asked for."""
        plan = self._trained(kind)[1]
        return plan if length is None else replace(plan, widths=(1,) * length)

    def _trained(self, kind: str) -> tuple[Any, Any]:
        """Weights of an adapter, read, checked and put beside the model once, and the plan to draft after."""
        stored = STORED[kind]
        if kind not in self._read:
            written, tensors = self._adapter(kind, stored.what)
            folder = self.adapter_folder(kind)
            assert folder is not None
            weights, plan = trained(folder, written, tensors, self.model.config)
            weights.to(self.model.device, torch.float32 if stored.is_float32 else self.model.dtype)
            self._read[kind] = weights, plan
        weights, plan = self._read[kind]
        return weights, self.plan if isinstance(self.plan, stored.plan) else plan

    def _layerskip(self, length: int | None) -> Drafter:
        """The model's own exit, a quarter of the way up unless a tuned plan says where."""
        config, plan = ExitConfig(max(1, self.model.config.num_layers // 4)), DraftPlan()
        if self._has_adapter("layerskip"):
            written, _ = self._adapter("layerskip", "an exit")
            config, plan = build(ExitConfig, written["config"]), build(DraftPlan, written["plan"])
        plan = self.plan if isinstance(self.plan, DraftPlan) else plan
        plan = plan if length is None else replace(plan, widths=(1,) * length)
        return exit_drafter(self.model, Exit(config, self.model.config), plan)

    def _lookahead(self, length: int | None) -> Drafter:
        plan = LookaheadPlan()
        if self._has_adapter("lookahead"):
            plan = build(LookaheadPlan, self._adapter("lookahead", "a plan")[0]["plan"])
        plan = self.plan if isinstance(self.plan, LookaheadPlan) else plan
        return Lookahead(self.model, plan if length is None else replace(plan, ngram=length + 1))

    def _skipdecode(self) -> SkipDecode:
        if not self._has_adapter("skipdecode"):
            return SkipDecode(self.model)
        return SkipDecode(self.model, build(SkipPlan, self._adapter("skipdecode", "a schedule")[0]["plan"]))

    def _adapter(self, kind: str, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """``config.json`` and weights of the adapter of a kind, checked against the model."""
        folder = self.adapter_folder(kind)
        if folder is None or not folder.is_dir():
            base = self.folder or "MODEL"
            raise NotFoundError(
                f"method {kind} needs {what} for this model and there is none in {folder or 'memory'}; "
                f"train one: vivace train {kind} --model {base} --data FILE --out {base}/adapters/{kind}"
            )
        if self.folder is None:
            raise NotFoundError("adapters can only be checked against a checkpoint folder, and this model has none")
        return read_adapter(kind, folder, self._base_hash)

    @cached_property
    def _base_hash(self) -> str:
        assert self.folder is not None, "a model in memory has no adapters"
        return base_hash(self.folder)

    def adapter_folder(self, kind: str) -> Path | None:
        """Where the adapter of a kind is, or would be; None for a model that only lives in memory."""
        inside = None if self.folder is None else self.folder / "adapters" / kind
        return self.adapters.get(kind, inside)

    def _has_adapter(self, kind: str) -> bool:
        folder = self.adapter_folder(kind)
        return folder is not None and folder.is_dir()

    def _draft_model(self, length: int | None) -> DraftModel:
        if self.second is None:
            own = f", or put one into {self.folder / OWN_DRAFT}" if self.folder is not None else ""
            raise NotFoundError(f"method draft needs a second, smaller model; give --draft-model DIR_OR_HUB_ID{own}")
        if length is None and isinstance(self.plan, DraftPlan):
            length = len(self.plan.widths)
        config = DraftModelConfig() if length is None else DraftModelConfig(num_draft_tokens=length)
        return DraftModel(self.second.decoder, self.model.config.vocab_size, config)

    def ready(self) -> list[str]:
        """Methods that can run on this model as it stands, ``auto`` left out."""
        names = []
        for name, method in METHODS.items():
            has_weights = method.adapter is None or self._has_adapter(method.adapter)
            if name != "auto" and has_weights and (name != "draft" or self.second is not None):
                names.append(name)
        return names


def _lookup(length: int | None) -> PromptLookup:
    return PromptLookup(LookupConfig() if length is None else LookupConfig(num_draft_tokens=length))

"""The composition root of decoding: a method's name in, its drafter out.

With ``recipe.py``, which holds the table of names, the only place that names two techniques together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from vivace.baselines.trained import Trained
from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.adaptive import Adaptive
from vivace.decode.draft_model import DraftModel, DraftModelConfig
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.session import DRAFT_SLACK
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, MismatchError, NotFoundError, UnsupportedError
from vivace.multirate.config import MultirateConfig
from vivace.multirate.drafter import AcceleratedGuess, drafter_by
from vivace.multirate.dynamic import DynamicConfig, DynamicDepth, DynamicPlan, DynamicWeights
from vivace.multirate.foresight import Foresight, ForesightClimb, ForesightConfig, ForesightPlan
from vivace.multirate.residual import Accelerator
from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.drafter import StreamDrafter
from vivace.multistream.streams import Streams
from vivace.recipe import METHODS, build, find_method
from vivace.storage.store import is_store, open_store

AnyPlan = DraftPlan | StreamPlan | RivalPlan
"""Shape of a draft, whoever makes it."""
LEAVING = ("dynamic", "calm", "lite")
"""Methods whose tokens leave early at a stated quality."""


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
    kinds = {method.adapter for method in METHODS.values() if method.adapter}
    found: dict[str, Path] = {}
    named = [Path(folder) for folder in folders]
    expected = _fingerprint(base) if named and base is not None else None
    for folder in named:
        kind = load_adapter(folder, expected)[0]["kind"]
        if kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise UnsupportedError(f"{folder} is an adapter for {kind!r}; this version uses adapters for {known}")
        if kind in found:
            raise ConfigError(f"{found[kind]} and {folder} are both adapters for {kind}; give one of them")
        found[kind] = folder
    return found


def _fingerprint(folder: Path) -> str:
    """What adapters of a checkpoint know it by; a store knows it of the checkpoint it was made from."""
    return open_store(folder).base if is_store(folder) else base_hash(folder)


class Methods:
    """The drafters of one model, each made when first asked for and kept with what it has measured."""

    def __init__(
        self,
        model: Decoder,
        folder: Path | None,
        adapters: Mapping[str, Path],
        second: Decoder | None = None,
        plan: AnyPlan | None = None,
    ) -> None:
        """Make nothing yet.

        Args:
            model: the target.
            folder: its checkpoint, None for a model that only lives in memory (adapters cannot be checked then).
            adapters: adapter folders by method; others are looked for in ``<folder>/adapters/<method>``.
            second: a smaller decoder with the same tokens, for the method ``draft``.
            plan: shape of the drafts, instead of what the adapters say.
        """
        self.model = model
        self.folder = folder
        self.adapters = adapters
        self.second = second
        self.plan = plan
        self._drafters: dict[tuple[str, int | None, float | None], Drafter] = {}

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
            leaves = method in LEAVING
            self._drafters[key] = self._leaving(*key) if leaves else self._make(method, num_draft_tokens)
        return self._drafters[key]

    def planned(self, plan: AnyPlan) -> Methods:
        """The same methods, drafting after another plan than their adapters'."""
        return Methods(self.model, self.folder, self.adapters, self.second, plan)

    def _make(self, method: str, length: int | None) -> Drafter:
        if length is not None and method in ("plain", "auto"):
            why = "drafts nothing" if method == "plain" else "finds out how far to draft"
            raise ConfigError(f"num_draft_tokens is {length}, but method {method} {why}; leave it out")
        if length is not None and length >= DRAFT_SLACK:
            raise ConfigError(f"num_draft_tokens is {length}; a draft has at most {DRAFT_SLACK - 1} guesses")
        match method:
            case "plain":
                return NoDrafts()
            case "lookup":
                return _lookup(length)
            case "draft":
                return self._draft_model(length)
            case "multirate" | "multirate+lookup":
                guess, plan = self._guess
                plan = plan if length is None else replace(plan, widths=(1,) * length)
                lookup = _lookup(length) if method.endswith("lookup") else None
                return drafter_by(guess, plan, lookup=lookup)
            case "multistream":
                return self._streams(length)
            case "medusa" | "eagle" | "deed" | "uno":
                return self._rival(method, length)
            case "foresight":
                return self._foresight(length)
            case "layerskip":
                return self._layerskip(length)
            case "lookahead":
                return self._lookahead(length)
            case "skipdecode":
                return self._skipdecode(length)
            case "mod":
                return self._mixture_of_depths(length)
        return self._adaptive()

    def _adaptive(self) -> Adaptive:
        """Everything that can draft here without further files, by the drafters of those methods themselves."""
        return Adaptive([self.drafter(name) for name in ("lookup", "multirate", "draft") if name in self.ready()])

    @cached_property
    def _guess(self) -> tuple[AcceleratedGuess, DraftPlan]:
        """Weights and plan of multirate, read and laid out once for all methods that draft with them."""
        written, tensors = self._adapter("multirate", "an accelerator")
        accelerator = Accelerator(build(MultirateConfig, written["config"]), self.model.config)
        self._require_shapes("multirate", accelerator.state_dict(), tensors)
        accelerator.load_state_dict(dict(tensors))
        plan = self.plan if isinstance(self.plan, DraftPlan) else build(DraftPlan, written["plan"])
        accelerator.to(self.model.device, self.model.dtype).requires_grad_(False)
        return AcceleratedGuess(self.model, accelerator), plan

    def _rival(self, method: str, length: int | None) -> Drafter:
        """One of ``baselines/`` that has weights."""
        kind = KINDS[method]
        weights, plan = self._trained_rival(method)
        plan = plan if length is None else replace(plan, widths=(1,) * length)
        return kind.drafter(self.model, weights, plan)

    def _trained_rival(self, method: str) -> tuple[Trained, Any]:
        """Weights and plan of a rival."""
        kind = KINDS[method]
        written, tensors = self._adapter(method, kind.what)
        weights = kind.weights(build(kind.config, written["config"]), self.model.config)
        self._require_shapes(method, weights.tensors(), tensors)
        weights.load_state_dict(dict(tensors), strict=False)  # what is no tensor of the file is not used
        plan = self.plan if isinstance(self.plan, kind.plan) else build(kind.plan, written["plan"])
        return weights.to(self.model.device, self.model.dtype).requires_grad_(False), plan

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

    def _streams(self, length: int | None) -> StreamDrafter:
        streams, plan = self._trained_streams
        plan = plan if length is None else replace(plan, widths=(1,) * length)
        return StreamDrafter(self.model, streams, plan)

    @cached_property
    def _trained_streams(self) -> tuple[Streams, StreamPlan]:
        """Weights and plan of multistream, read once."""
        written, tensors = self._adapter("multistream", "speculative streams")
        streams = Streams(build(MultistreamConfig, written["config"]), self.model.config)
        self._require_shapes("multistream", streams.state_dict(), tensors)
        streams.load_state_dict(dict(tensors))
        plan = self.plan if isinstance(self.plan, StreamPlan) else build(StreamPlan, written["plan"])
        return streams.to(self.model.device, self.model.dtype).requires_grad_(False), plan

    def _foresight(self, length: int | None) -> NoDrafts:
        if length is not None:
            raise ConfigError(f"num_draft_tokens is {length}, but method foresight drafts nothing; leave it out")
        written, tensors = self._adapter("foresight", "a residual that runs ahead")
        foresight = Foresight(build(ForesightConfig, written["config"]), self.model.config)
        self._require_shapes("foresight", foresight.state_dict(), tensors)
        foresight.load_state_dict(dict(tensors))
        plan = build(ForesightPlan, written["plan"])
        foresight.to(self.model.device, self.model.dtype).requires_grad_(False)
        return NoDrafts("foresight", ForesightClimb(foresight, plan.count, refine=plan.refine))

    def _leaving(self, method: str, length: int | None, quality: float | None) -> Drafter:
        if length is not None:
            raise ConfigError(f"num_draft_tokens is {length}, but method {method} drafts nothing; leave it out")
        return self._dynamic(quality) if method == "dynamic" else self._confident(method, quality)

    def _confident(self, method: str, quality: float | None) -> ConfidentDepth:
        written, tensors = self._adapter(method, "thresholds")
        weights = Confidence(build(ConfidenceConfig, written["config"]), self.model.config)
        self._require_shapes(method, weights.tensors(), tensors)
        weights.load_state_dict(dict(tensors))
        weights.to(self.model.device).requires_grad_(False)
        return ConfidentDepth(method, weights, build(ConfidencePlan, written["plan"]), quality)

    def _skipdecode(self, length: int | None) -> SkipDecode:
        if length is not None:
            raise ConfigError(f"num_draft_tokens is {length}, but method skipdecode drafts nothing; leave it out")
        if not self._has_adapter("skipdecode"):
            return SkipDecode(self.model)
        return SkipDecode(self.model, build(SkipPlan, self._adapter("skipdecode", "a schedule")[0]["plan"]))

    def _mixture_of_depths(self, length: int | None) -> MixtureOfDepths:
        if length is not None:
            raise ConfigError(f"num_draft_tokens is {length}, but method mod drafts nothing; leave it out")
        written, tensors = self._adapter("mod", "routers, and a model that was fine-tuned for them,")
        routers = Routers(build(ModConfig, written["config"]), self.model.config)
        self._require_shapes("mod", routers.tensors(), tensors)
        routers.load_state_dict(dict(tensors))
        routers.to(self.model.device).requires_grad_(False)
        return MixtureOfDepths(routers, build(ModPlan, written["plan"]))

    def _dynamic(self, quality: float | None) -> DynamicDepth:
        written, tensors = self._adapter("dynamic", "gates and a router")
        weights = DynamicWeights(build(DynamicConfig, written["config"]), self.model.config)
        self._require_shapes("dynamic", weights.tensors(), tensors)
        weights.load(tensors)
        weights.gates.to(self.model.device, self.model.dtype).requires_grad_(False)
        weights.router.to(self.model.device, torch.float32).requires_grad_(False)
        return DynamicDepth(weights, build(DynamicPlan, written["plan"]), quality)

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
        written, tensors = load_adapter(folder, self._base_hash)
        if written["kind"] != kind:
            raise MismatchError(f"{folder} is an adapter for {written['kind']}, not for {kind}")
        return written, tensors

    @cached_property
    def _base_hash(self) -> str:
        assert self.folder is not None, "a model in memory has no adapters"
        return _fingerprint(self.folder)

    def _require_shapes(self, kind: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        if {name: value.shape for name, value in expected.items()} != {n: v.shape for n, v in found.items()}:
            folder = self.adapter_folder(kind)
            raise MismatchError(f"the weights in {folder} do not fit its config.json; train the adapter again")

    def adapter_folder(self, kind: str) -> Path | None:
        """Where the adapter of a kind is, or would be; None for a model that only lives in memory."""
        inside = None if self.folder is None else self.folder / "adapters" / kind
        return self.adapters.get(kind, inside)

    def _has_adapter(self, kind: str) -> bool:
        folder = self.adapter_folder(kind)
        return folder is not None and folder.is_dir()

    def _draft_model(self, length: int | None) -> DraftModel:
        if self.second is None:
            raise NotFoundError("method draft needs a second, smaller model; give --draft-model DIR_OR_HUB_ID")
        if length is None and isinstance(self.plan, DraftPlan):
            length = len(self.plan.widths)
        config = DraftModelConfig() if length is None else DraftModelConfig(num_draft_tokens=length)
        return DraftModel(self.second, self.model.config.vocab_size, config)

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

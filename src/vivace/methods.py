"""The composition root of decoding: a method's name in, its drafter out.

With ``recipe.py``, which holds the table of names, the only place that names two techniques together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

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
from vivace.multirate.drafter import self_speculation
from vivace.multirate.residual import Accelerator
from vivace.recipe import METHODS, build, find_method


def adapters_by_method(folders: Iterable[str | Path], base: Path | None) -> dict[str, Path]:
    """Adapter folders by the method they are for, as their own ``config.json`` says.

    Args:
        folders: what the user named.
        base: checkpoint they shall run on; None does not check.

    Raises:
        CheckpointError: one is missing, broken or of another base.
        ConfigError: two are for the same method.
        UnsupportedError: one is for a method that is not built yet.
    """
    kinds = {method.adapter for method in METHODS.values() if method.built and method.adapter}
    found: dict[str, Path] = {}
    for folder in map(Path, folders):
        kind = load_adapter(folder, None if base is None else base_hash(base))[0]["kind"]
        if kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise UnsupportedError(f"{folder} is an adapter for {kind!r}; this version uses adapters for {known}")
        if kind in found:
            raise ConfigError(f"{found[kind]} and {folder} are both adapters for {kind}; give one of them")
        found[kind] = folder
    return found


class Methods:
    """The drafters of one model, each made when first asked for and kept with what it has measured."""

    def __init__(
        self, model: Decoder, folder: Path | None, adapters: Mapping[str, Path], second: Decoder | None = None
    ) -> None:
        """Make nothing yet.

        Args:
            model: the target.
            folder: its checkpoint, None for a model that only lives in memory (adapters cannot be checked then).
            adapters: adapter folders by method; others are looked for in ``<folder>/adapters/<method>``.
            second: a smaller decoder with the same tokens, for the method ``draft``.
        """
        self.model = model
        self.folder = folder
        self.adapters = adapters
        self.second = second
        self._drafters: dict[tuple[str, int | None], Drafter] = {}

    def drafter(self, method: str, num_draft_tokens: int | None = None) -> Drafter:
        """The drafter of a method, made once.

        Raises:
            ConfigError: no such method, or a number of guesses for one that does not take it.
            UnsupportedError: not built yet.
            NotFoundError: its weights are missing; names the command that trains them.
        """
        find_method(method)
        key = (method, num_draft_tokens)
        if key not in self._drafters:
            self._drafters[key] = self._make(method, num_draft_tokens)
        return self._drafters[key]

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
                accelerator, plan = self._accelerator()
                plan = plan if length is None else replace(plan, widths=(1,) * length)
                lookup = _lookup(length) if method.endswith("lookup") else None
                return self_speculation(self.model, accelerator, plan, lookup=lookup)
        return self._adaptive()

    def _adaptive(self) -> Adaptive:
        """Everything that can draft here without further files."""
        return Adaptive([self._make(name, None) for name in ("lookup", "multirate", "draft") if name in self.ready()])

    def _accelerator(self) -> tuple[Accelerator, DraftPlan]:
        folder = self._adapter_folder("multirate")
        if folder is None or not folder.is_dir():
            base = self.folder or "MODEL"
            raise NotFoundError(
                f"method multirate needs an accelerator for this model and there is none in {folder or 'memory'}; "
                f"train one: vivace train multirate --model {base} --data FILE --out {base}/adapters/multirate"
            )
        if self.folder is None:
            raise NotFoundError("adapters can only be checked against a checkpoint folder, and this model has none")
        written, tensors = load_adapter(folder, base_hash(self.folder))
        if written["kind"] != "multirate":
            raise MismatchError(f"{folder} is an adapter for {written['kind']}, not for multirate")
        accelerator = Accelerator(build(MultirateConfig, written["config"]), self.model.config)
        expected = {name: value.shape for name, value in accelerator.state_dict().items()}
        if expected != {name: value.shape for name, value in tensors.items()}:
            raise MismatchError(f"the weights in {folder} do not fit its config.json; train the adapter again")
        accelerator.load_state_dict(dict(tensors))
        plan = build(DraftPlan, written["plan"])
        return accelerator.to(self.model.device, self.model.dtype).requires_grad_(False), plan

    def _adapter_folder(self, kind: str) -> Path | None:
        inside = None if self.folder is None else self.folder / "adapters" / kind
        return self.adapters.get(kind, inside)

    def _has_adapter(self, kind: str) -> bool:
        folder = self._adapter_folder(kind)
        return folder is not None and folder.is_dir()

    def _draft_model(self, length: int | None) -> DraftModel:
        if self.second is None:
            raise NotFoundError("method draft needs a second, smaller model; give --draft-model DIR_OR_HUB_ID")
        config = DraftModelConfig() if length is None else DraftModelConfig(num_draft_tokens=length)
        return DraftModel(self.second, self.model.config.vocab_size, config)

    def ready(self) -> list[str]:
        """Methods that can run on this model as it stands, ``auto`` left out."""
        names = []
        for name, method in METHODS.items():
            has_weights = method.adapter is None or self._has_adapter(method.adapter)
            if method.built and name != "auto" and has_weights and (name != "draft" or self.second is not None):
                names.append(name)
        return names


def _lookup(length: int | None) -> PromptLookup:
    return PromptLookup(LookupConfig() if length is None else LookupConfig(num_draft_tokens=length))

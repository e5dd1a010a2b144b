"""Makes drafters from method names: finds and checks weights, reads draft models, and counts their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vivace.checkpoint.adapters import TENSORS, base_hash, load_adapter, weights_hash
from vivace.checkpoint.draft_vocabulary import first_of, read_vocabulary
from vivace.checkpoint.files import OWN_DRAFT, is_linked, named_file
from vivace.checkpoint.generation import load_eos_ids
from vivace.checkpoint.load import least_bytes, load_decoder, read_config
from vivace.checkpoint.tokenizer import Tokenizer, find_tokenizer, require_same_pieces
from vivace.checkpoint.widen import AdapterTwin
from vivace.configuration import build
from vivace.core.config import ModelConfig
from vivace.core.footprint import held_bytes
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.memory import DRAFT_SLACK, MemoryBudget
from vivace.errors import ConfigError, MismatchError, NotFoundError, UnsupportedError
from vivace.kernels.low_bit import Weights
from vivace.kernels.processor import processor_name
from vivace.methods.spec import MethodSpec, Plan, Stored
from vivace.methods.table import METHODS, find_method

T = TypeVar("T")


def stored_of(kind: str) -> Stored:
    """Return how the files of a kind of weights are read."""
    stored = METHODS[kind].stored
    assert stored is not None, f"{kind} keeps no files"
    return stored()


def plan_of(method: str, values: Mapping[str, Any]) -> Plan:
    """Return a method's plan from its keys and values, such as ``{"widths": [1, 1, 1]}``.

    Raises:
        ConfigError: the method has no plan, or the plan has no such key or value.
    """
    spec = find_method(method)
    kind = METHODS[spec.adapter or method]
    if not kind.is_tuned:
        raise ConfigError(f"method {method} drafts by no plan; leave it out")
    return cast(Plan, build(stored_of(kind.name).plan, values))


def twins() -> dict[str, AdapterTwin]:
    """Return, by method, how its weights are widened, for all methods whose weights can be."""
    return {spec.name: AdapterTwin(spec.widen, spec.has_twin) for spec in METHODS.values() if spec.widen is not None}


def read_adapter(kind: str, folder: Path, base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``config.json`` and the weights of an adapter for a method.

    Args:
        kind: name of the method.
        folder: folder of the adapter.
        base: ``base_hash`` of the checkpoint it has to fit.

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
    """Return the module that holds an adapter's weights, and the plan stored with them.

    Args:
        folder: folder of the adapter.
        written: its ``config.json``.
        tensors: its weights.
        model: config of the model on which they were trained.

    Raises:
        MismatchError: the two files are not of one adapter.
    """
    stored = stored_of(written["kind"])
    assert stored.weights is not None, "a plan alone has no weights"
    weights = stored.weights(build(stored.config, written["config"]), model)
    expected = {name: value.shape for name, value in weights.tensors().items()}
    if expected != {name: value.shape for name, value in tensors.items()}:
        raise MismatchError(f"the weights in {folder} do not fit its config.json; train the adapter again")
    weights.load_state_dict(tensors, strict=False)  # a module may have unused tensors that the file lacks
    return weights.requires_grad_(False), build(stored.plan, written["plan"])


def adapters_by_method(folders: Iterable[str | Path], base: Path | None) -> dict[str, Path]:
    """Return adapter folders by the method that their own ``config.json`` names.

    Args:
        folders: folders that the user named.
        base: checkpoint that they have to fit; None does not check.

    Raises:
        CheckpointError: one is missing, broken or of another base.
        ConfigError: two are for the same method.
        UnsupportedError: one is for a method that this version does not know.
    """
    kinds = {method.name for method in METHODS.values() if method.stored is not None and method.keeps_plan}
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


def check_room(
    memory: MemoryBudget,
    path: str | Path,
    what: str,
    dtype: str,
    kept: Weights,
    hint: str = "",
    *,
    ignored: Sequence[str] = (),
) -> None:
    """Raise an error for a model that cannot fit into memory, before it is read.

    Args:
        memory: the limit.
        path: checkpoint of the model.
        what: name of the model in messages.
        dtype: as ``load_decoder`` takes it.
        kept: format of its matrices.
        hint: what can be done besides giving more memory.
        ignored: as ``load_decoder`` takes it.

    Raises:
        MemoryLimitError: its weights alone are too large.
    """
    if memory.limit_bytes is not None:
        memory.check_held(least_bytes(path, dtype, kept, ignored), what, hint)


def read_draft_model(
    path: str | Path,
    tokenizer: Tokenizer,
    memory: MemoryBudget,
    kept: Weights,
    *,
    dtype: str,
    ignored: Sequence[str] = (),
    **how: Any,
) -> Decoder:
    """Load a draft model, which must have the target's tokens, and count its memory.

    ``how`` is as for ``load_decoder``. Keys of ``ignored`` that its configuration does not have are passed over, as
    they are those of the model.

    Raises:
        CheckpointError: it is missing, broken or of other tokens.
        MemoryLimitError: it does not fit into memory.
    """
    require_same_pieces(tokenizer, find_tokenizer(path))
    written = read_config(path)
    ignored = [key for key in ignored if key in written]
    check_room(memory, path, "the draft model", dtype, kept, ignored=ignored)
    decoder = load_decoder(path, dtype=dtype, ignored=ignored, **how)
    memory.hold(decoder, held_bytes(decoder)[0], "the draft model")
    return decoder


@dataclass(eq=False)
class DraftModelSource:
    """A smaller model with the same tokens, read when it is first needed."""

    open: Callable[[], Decoder]
    folder: Path
    """Its checkpoint, by which its measurements are told from another's."""
    is_asked: bool
    """Whether the user named it; otherwise it was found beside the model."""
    _read: Decoder | None = field(default=None, init=False)

    @property
    def decoder(self) -> Decoder:
        """Return the model, read on first use."""
        if self._read is None:
            self._read = self.open()
        return self._read

    @property
    def holds(self) -> tuple[Decoder, ...]:
        """Return the model in a tuple if it has been read, else an empty tuple."""
        return () if self._read is None else (self._read,)


class Methods:
    """The drafters of one model. Each is made when it is first asked for, and kept with its measurements."""

    def __init__(
        self,
        model: Decoder,
        folder: Path | None,
        adapters: Mapping[str, Path],
        second: DraftModelSource | None = None,
        plan: Plan | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        """Store what drafters are made from; none is made yet.

        Args:
            model: the target.
            folder: its checkpoint; None for a model that exists only in memory, on which adapters cannot be checked.
            adapters: adapter folders by method; others are looked for in ``<folder>/adapters/<method>``.
            second: the draft model of the method ``draft``.
            plan: shape of the drafts, in place of what the adapters say.
            memory: limit that counts the weights of methods and copies made for them; None sets no limit.
        """
        self.model = model
        self.folder = folder
        self.adapters = adapters
        self.second = second
        self.plan = plan
        self.memory = MemoryBudget() if memory is None else memory
        self.remembers = False
        """Whether ``auto`` keeps its measurements in a file for later runs."""
        self._drafters: dict[tuple[str, int | None, float | None], Drafter] = {}
        self._read: dict[str, tuple[Any, Any]] = {}
        self._shared: dict[str, Any] = {}
        self._counted = WeakIdKeyDictionary()
        """Bytes that each of these objects holds of ``memory``."""

    def drafter(self, method: str, num_draft_tokens: int | None = None, quality: float | None = None) -> Drafter:
        """Return the drafter of a method, made once.

        Args:
            method: its name.
            num_draft_tokens: guesses per step; None leaves it to the method or its adapter.
            quality: agreement with the whole model, for methods with early exits; None leaves it to the method.

        Raises:
            ConfigError: there is no such method, or it takes no number of guesses or no quality.
            NotFoundError: its weights are missing; the message names the command that trains them.
            MemoryLimitError: they do not fit into the memory that is left; ``BusyError`` if running texts hold it.
            UnsupportedError: it cannot run on this model.
        """
        spec = find_method(method)
        if quality is not None and not spec.has_quality:
            raise ConfigError(f"quality is {quality:g}, but method {method} does not leave early; leave it out")
        if num_draft_tokens is not None and spec.no_length is not None:
            asked = f"num_draft_tokens is {num_draft_tokens}"
            raise ConfigError(f"{asked}, but method {method} {spec.no_length}; leave it out")
        if num_draft_tokens is not None and not 0 < num_draft_tokens < DRAFT_SLACK:
            raise ConfigError(f"num_draft_tokens is {num_draft_tokens}; a draft has 1 to {DRAFT_SLACK - 1} guesses")
        key = (method, num_draft_tokens, None if quality is None else round(quality, 6))
        if key not in self._drafters:
            if (reason := spec.reason_against(self.model)) is not None:
                raise UnsupportedError(f"method {method} cannot run on this model: {reason}")
            made = spec.make(_Context(self, spec, num_draft_tokens, quality))
            self._count(made, f"method {method}")
            self._drafters[key] = made
        return self._drafters[key]

    def _count(self, made: object, what: str) -> None:
        """Count the memory of a new object, and by how much others have grown for it, such as by copies of layers."""
        known = [self.model, *(() if self.second is None else self.second.holds)]
        owners = [*(weights for weights, _ in self._read.values()), *self._shared.values(), *self._drafters.values()]
        for owner, size in zip((*owners, made), held_bytes(*known, *owners, made)[len(known) :], strict=True):
            self.memory.hold(owner, max(0, size - self._counted.get(owner, 0)), what)
            self._counted[owner] = size

    def planned(self, plan: Plan) -> Methods:
        """Return the same methods and weights with ``plan`` in place of the adapters' plans."""
        other = copy(self)
        other.plan, other._drafters = plan, {}
        return other

    def vocabulary(self, kind: str, size: int) -> Tensor | None:
        """Return the tokens that weights of a kind may guess, ascending; None for size 0, which is all."""
        if size == 0:
            return None
        folder = self.adapter_folder(kind)
        if folder is None or self.folder is None:
            raise NotFoundError("a draft vocabulary lies beside a checkpoint folder, and this model has none")
        ends = load_eos_ids(self.folder)
        return first_of(read_vocabulary(folder, self.model.config.vocab_size, ends), size, len(set(ends)))

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """Return an object that several methods share, made by the first that asks for it."""
        if key not in self._shared:
            made = make()
            self._count(made, key)
            self._shared[key] = made
        return cast(T, self._shared[key])

    def trained(self, kind: str) -> tuple[Any, Any]:
        """Return the weights of a kind, read and checked once, and the plan to draft with."""
        stored = stored_of(kind)
        if kind not in self._read:
            written, tensors = self._adapter(kind, stored.what)
            folder = self.adapter_folder(kind)
            assert folder is not None
            weights, plan = trained(folder, written, tensors, self.model.config)
            weights.to(self.model.device, torch.float32 if stored.is_float32 else self.model.dtype)
            self._count(weights, f"weights of {kind}")
            self._read[kind] = weights, plan
        weights, plan = self._read[kind]
        return weights, self.plan if isinstance(self.plan, stored.plan) else plan

    def planned_as(self, spec: MethodSpec, default: Any) -> tuple[Any, Any]:
        """Return (config, plan) of a method without weights: those asked for, else those stored, else the defaults."""
        stored, plan = stored_of(spec.name), default
        config = None if stored.default_config is None else stored.default_config(self.model.config)
        if spec.keeps_plan and self._has_adapter(spec.name):
            written, _ = self._adapter(spec.name, stored.what)
            plan = build(stored.plan, written["plan"])
            config = config if config is None else build(stored.config, written["config"])
        return config, self.plan if isinstance(self.plan, stored.plan) else plan

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """Return the tensors stored for a method that can do without; empty where there are none."""
        return self._adapter(kind, stored_of(kind).what)[1] if self._has_adapter(kind) else {}

    def _adapter(self, kind: str, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return ``config.json`` and weights of the adapter of a kind, checked against the model."""
        folder = self.adapter_folder(kind)
        if folder is None or not folder.is_dir():
            raise NotFoundError(f"method {kind} needs {what} for this model and {self._how_to_train(kind, folder)}")
        if self.folder is None:
            raise NotFoundError("adapters can only be checked against a checkpoint folder, and this model has none")
        return read_adapter(kind, folder, self._base_hash)

    def _how_to_train(self, kind: str, looked_at: Path | None) -> str:
        """Return where an adapter was looked for, and the command that makes one."""
        command = f"train one: vivace train {kind} --model"
        if self.folder is not None and is_linked(self.folder):
            return f"none is given; {command} {named_file(self.folder)} --data FILE --out DIR, and give --adapter DIR"
        base = self.folder or "MODEL"
        return f"there is none in {looked_at or 'memory'}; {command} {base} --data FILE --out {base}/adapters/{kind}"

    @cached_property
    def _base_hash(self) -> str:
        assert self.folder is not None, "a model in memory has no adapters"
        return base_hash(self.folder)

    @property
    def place(self) -> str | None:
        """Return what speeds depend on: machine, kernels, threads and model; None for a model without a folder."""
        if self.folder is None:
            return None
        backend = self.model.backend
        body = getattr(getattr(backend, "body", None), "name", "torch" if backend.span is None else "graphs")
        device = self.model.device
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
        kind = f"{str(self.model.dtype).removeprefix('torch.')} as {backend.weights}"
        threads = f"{torch.get_num_threads()} threads"
        return "; ".join((machine, f"{body} kernels", threads, kind, self._base_hash[:16]))

    def adapter_folder(self, kind: str) -> Path | None:
        """Return the folder where the adapter of a kind is or would be; None for a model that exists only in memory."""
        inside = None if self.folder is None else self.folder / "adapters" / kind
        return self.adapters.get(kind, inside)

    def _has_adapter(self, kind: str) -> bool:
        folder = self.adapter_folder(kind)
        return folder is not None and folder.is_dir()

    def draft_model(self) -> Decoder:
        """Return the second, smaller model.

        Raises:
            NotFoundError: none was named and none lies beside the model.
        """
        if self.second is None:
            own = ""
            if self.folder is not None and not is_linked(self.folder):
                own = f", or put one into {self.folder / OWN_DRAFT}"
            raise NotFoundError(f"method draft needs a second, smaller model; give --draft-model MODEL{own}")
        return self.second.decoder

    def ready(self) -> list[str]:
        """Return the methods that can run on this model with the weights at hand, without ``auto``."""
        return [spec.name for spec in METHODS.values() if spec.name != "auto" and self._is_ready(spec)]

    def runnable(self) -> list[str]:
        """Return the methods that somebody may ask for: those that are ready, and those that can do without the weights
        that make them better.
        """
        ready = set(self.ready())
        return [
            spec.name
            for spec in METHODS.values()
            if spec.name in ready
            or (
                spec.adapter is not None
                and stored_of(spec.adapter).default_config is not None
                and spec.reason_against(self.model) is None
            )
        ]

    def _is_ready(self, spec: MethodSpec) -> bool:
        has_weights = spec.adapter is None or self._has_adapter(spec.adapter)
        has_parts = has_weights and (self.second is not None or not spec.needs_draft_model)
        return has_parts and spec.reason_against(self.model) is None

    def has_plan(self, spec: MethodSpec) -> bool:
        """Return whether a plan is stored for a method,."""
        return self._has_adapter(spec.name)


@dataclass(frozen=True)
class _Context:
    """Implements ``MethodContext`` for one method of one model."""

    methods: Methods
    spec: MethodSpec
    length: int | None
    quality: float | None

    @property
    def model(self) -> Decoder:
        """Return the target."""
        return self.methods.model

    @property
    def kind(self) -> str:
        """Return the name of the method whose weights are used."""
        return self.spec.adapter or self.spec.name

    def vocabulary(self, size: int) -> Tensor | None:
        """Return the tokens of the method's draft vocabulary that may be guessed."""
        return self.methods.vocabulary(self.kind, size)

    def trained(self) -> tuple[Any, Any]:
        """Return the method's weights and the plan to draft with."""
        assert self.spec.adapter is not None, f"{self.spec.name} has no weights"
        return self.methods.trained(self.spec.adapter)

    def planned(self, default: Any) -> tuple[Any, Any]:
        """Return (config, plan) of a method without weights."""
        return self.methods.planned_as(METHODS[self.kind], default)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what is stored beside the plan of a method that can do without."""
        return self.methods.tensors(self.kind)

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """Return an object that several methods of this model share."""
        return self.methods.shared(key, make)

    def draft_model(self) -> Decoder:
        """Return the second, smaller model."""
        return self.methods.draft_model()

    def drafters(self) -> tuple[Drafter, Sequence[Drafter]]:
        """Return plain decoding, and what can run here; a draft model only if the user named it, and last."""
        second, ready = self.methods.second, self.methods.ready()
        is_asked = second is not None and second.is_asked
        tried = [spec for spec in METHODS.values() if spec.is_tried_by_auto and spec.name in ready]
        tried = [spec for spec in tried if is_asked or not spec.needs_draft_model]
        tried.sort(key=lambda spec: spec.needs_draft_model)
        return self.methods.drafter("plain"), [self.methods.drafter(spec.name) for spec in tried]

    def place(self) -> str | None:
        """Return under which name measurements are kept, where this engine keeps any."""
        return self.methods.place if self.methods.remembers else None

    def fingerprint(self, method: str) -> str:
        """Return what tells the weights of a method from others."""
        spec, second = METHODS[method], self.methods.second
        if spec.needs_draft_model:
            return "" if second is None else base_hash(second.folder)[:8]
        folder = self.methods.adapter_folder(spec.adapter or spec.name)
        path = None if folder is None else folder / TENSORS
        return "" if path is None or not path.is_file() else weights_hash(path)

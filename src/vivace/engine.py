"""Loading a checkpoint into an engine that answers prompts: the interface for Python.

In four lines:

    engine = vivace.load("path/or/hub-id")
    result = engine.generate("Describe: name[Green Man], food[Indian]")[0]
    for chunk in engine.stream("Describe: name[Green Man], food[Indian]"):
        print(chunk.text, end="")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.files import OWN_DRAFT, resolve
from vivace.checkpoint.generation import load_generation_defaults
from vivace.checkpoint.load import choose_device, choose_dtype, load_decoder
from vivace.checkpoint.tokenizer import TextStream, Tokenizer, load_tokenizer, require_same_pieces
from vivace.core.cpu.backend import CpuBackend
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.step import Step
from vivace.decode.request import Emitted, FinishReason, Request, StopRule
from vivace.decode.session import Progress, Session
from vivace.decode.stats import DecodeStats
from vivace.errors import CapacityError, ConfigError, NotFoundError, UnsupportedError, nearest
from vivace.kernels.choice import Choice, choose
from vivace.kernels.low_bit import Weights, check_weights
from vivace.methods.composition import DraftModelSource, Methods, adapters_by_method
from vivace.storage.loading import Storage, load_stored
from vivace.storage.store import is_store
from vivace.units import parse_bytes

Prompt = str | Sequence[Mapping[str, str]]
"""Text, which becomes one user message unless ``raw``, or a list of messages."""

SHIPPED = Path(__file__).parent / "weights" / "vivace-14m"
"""Folder of the model that comes with the package."""

DEFAULT_NEW_TOKENS = 256
"""Length limit of an answer if neither the caller nor the checkpoint sets one; less if the context ends earlier."""

EXACT_ROWS = 64
"""Number of rows of every decoding pass in exact mode, enough for drafts of up to 63 tokens."""

_SAMPLES_ONLY = ("temperature", "top_p", "top_k", "min_p")
"""Options that have no effect on greedy decoding."""


@dataclass(frozen=True)
class Options:
    """Settings of generation, under Hugging Face's names; None uses the checkpoint's ``generation_config.json``."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_strings: str | Sequence[str] | None = None
    ignore_eos: bool = False
    seed: int = 0
    method: str = "auto"
    raw: bool = False
    """Whether to use the prompt as it is, without the chat template."""
    logprobs: bool = True
    """Whether to return log p of every token under the model, before any logits processor."""
    batch_size: int = 16
    """Number of sequences decoded at once; further prompts wait."""
    exact: bool = False
    """Whether to pad every decoding pass to the same number of rows. This is slower, and only needed on machines where
    the bits of a row's result depend on the number of rows computed with it (``docs/losslessness.md``).
    """
    num_draft_tokens: int | None = None
    """Number of draft tokens per step, for a method that drafts; None uses the method's or its adapter's."""
    quality: float | None = None
    """Agreement target of a method with early exits: the share of early-exit tokens that should equal the whole
    model's. It must be one of the targets that the adapter was calibrated for. None is .98.
    """
    progress: Progress | None = None
    """Called with the number of prompt tokens read and their total while prompts are read."""

    def __post_init__(self) -> None:
        for name, value, least in (("batch_size", self.batch_size, 1), ("min_new_tokens", self.min_new_tokens, 0)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Options:
        """Build options from keyword arguments.

        Raises:
            ConfigError: a name is unknown; the message names the nearest.
        """
        known = {f.name for f in dataclasses.fields(Options)}
        for name in values:
            if name not in known:
                raise ConfigError(f"generate has no argument {name!r}{nearest(name, known)}")
        return Options(**values)


@dataclass(frozen=True)
class Result:
    """The answer to one prompt."""

    text: str
    """The text, without special tokens and without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """The generated tokens, including an end token."""
    logprobs: tuple[float, ...] | None
    """log p of each generated token, if it was asked for."""
    finish_reason: FinishReason
    stats: DecodeStats
    method: str
    """The method that was asked for."""
    choice: str | None = None
    """What ``auto`` chose; None for other methods."""


@dataclass(frozen=True)
class Chunk:
    """A part of an answer while it is generated; the last one also has the result."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    adapters: str | Path | Mapping[str, str | Path] | None = None,
    draft_model: str | Path | None = None,
    kernels: str = "auto",
    weights: str = "bf16",
    memory: str | int | None = None,
    reader: str = "auto",
) -> Engine:
    """Load a checkpoint.

    Args:
        path: directory or Hub id; None is the model that ships with the package.
        device: "auto" or "cpu".
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        adapters: a folder, or folders by name; each is used by the method named in its ``config.json``. A method
            without one uses ``<model>/adapters/<method>``.
        draft_model: a smaller checkpoint for the method ``draft``; None is ``<path>/draft`` if it exists.
        kernels: "auto" (the fastest that run here and fit the weights), "torch", "avx2", "avx512" or "amx".
        weights: format of matrices in memory, also of the draft model: "bf16" (as in the checkpoint); "int8", "q4" or
            "lut4", which are quantized while loading and compute in bfloat16 if ``dtype`` is "auto"; or "exact12",
            which holds bfloat16 in twelve bits without loss.
        memory: limit for weights, buffers and cache together, such as "2GiB". It needs a store (``vivace convert
            --store``), whose remaining weights are read while they are used. None loads everything into memory.
        reader: how a store is read: "auto" (the fastest here), "direct", "buffered" or "mmap".

    Raises:
        CheckpointError: the checkpoint or an adapter is missing, broken or of another base.
        UsageError: something that is not supported was asked for.
        DependencyError: native kernels were asked for by name and are not built.
    """
    choice, kept = choose(kernels), check_weights(weights)
    if kept not in ("bf16", "exact12") and dtype == "auto":
        dtype = "bfloat16"
    if path is None and not SHIPPED.is_dir():
        raise NotFoundError("this installation carries no model; give --model DIR_OR_HUB_ID")
    folder = resolve(SHIPPED if path is None else path)
    storage = None
    if is_store(folder):
        _check_stored(kept, device)
        budget = None if memory is None else parse_bytes(memory)
        model, storage = load_stored(folder, budget, reader=reader, body=choice.body)
        _check_stored_dtype(dtype, model.dtype)
    elif memory is not None or reader != "auto":
        asked = "memory" if memory is not None else "reader"
        raise ConfigError(
            f"{asked} is for a store, {folder} is a checkpoint: vivace convert OUT --store --model {folder}"
        )
    backend = partial(_backend, choice, kept, is_required=kernels != "auto")
    if storage is None:
        model = load_decoder(folder, dtype=dtype, device=device, backend=backend)
    tokenizer = load_tokenizer(folder)
    second, own = None, folder / OWN_DRAFT
    if draft_model is not None or (own / "config.json").is_file():
        smaller = own if draft_model is None else draft_model
        read = partial(_read_second, smaller, tokenizer, dtype=dtype, device=device, backend=backend)
        second = DraftModelSource(read, is_asked=draft_model is not None)
        if second.is_asked:
            second.decoder  # noqa: B018 - a draft model that was named is read now, so that errors come from here
    if storage is not None and storage.plan.streamed and storage.body is None:
        choice = _torch_only(kernels)
    if storage is not None and storage.body is None and (chosen := backend(model.dtype)) is not None:
        model.run_on(chosen)
    if choice.body is not None and model.dtype != torch.bfloat16:
        choice = Choice("torch", f"native kernels are for bfloat16, the weights are {model.dtype}", None)
    folders = adapters.values() if isinstance(adapters, Mapping) else [] if adapters is None else [adapters]
    methods = Methods(model, folder, adapters_by_method(folders, folder), second)
    engine = Engine(model, tokenizer, methods, load_generation_defaults(folder), choice, kept)
    engine.storage = storage
    return engine


def _read_second(path: str | Path, tokenizer: Tokenizer, **how: Any) -> Decoder:
    """Load a draft model, which must have the same tokens; ``how`` is as for ``load_decoder``."""
    require_same_pieces(tokenizer, load_tokenizer(resolve(path)))
    return load_decoder(path, **how)


def _check_stored(kept: str, device: str) -> None:
    """Refuse weight formats and devices that a store cannot be used with."""
    choose_device(device)
    if kept != "bf16":
        raise UnsupportedError(f"a store keeps its weights as they were converted, {kept} was asked for; leave it out")


def _check_stored_dtype(asked: str, found: torch.dtype) -> None:
    """Refuse a dtype other than the store's."""
    if asked != "auto" and choose_dtype(asked, found, torch.device("cpu")) != found:
        raise UnsupportedError(f"this store holds {found}, {asked} was asked for; convert it with --dtype {asked}")


def _torch_only(asked: str) -> Choice:
    """Return PyTorch as the kernels of a store whose weights are streamed; refuse native kernels asked for by name."""
    if asked not in ("auto", "torch"):
        raise UnsupportedError(
            f"{asked} kernels cannot stream this store: convert it with --kernels {asked}, give --kernels torch, "
            "or more memory"
        )
    return Choice("torch", "this store was not converted for native kernels", None)


def _backend(choice: Choice, kept: Weights, dtype: torch.dtype, *, is_required: bool) -> CpuBackend | None:
    """Return the backend for a decoder of this dtype; None runs its modules with PyTorch.

    Native kernels compute in bfloat16. A decoder of another dtype runs with PyTorch, unless native kernels were
    asked for by name: the backend then refuses it.
    """
    takes = is_required or dtype == torch.bfloat16 or kept == "exact12"
    body = choice.body if takes else None
    return None if body is None and kept == "bf16" else CpuBackend(body, kept)


class Engine:
    """A model ready to answer. It keeps its drafters, and what ``auto`` has measured, between calls."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        methods: Methods,
        defaults: Mapping[str, Any],
        kernels: Choice,
        weights: str = "bf16",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.methods = methods
        self.defaults = defaults
        """Generation settings of the checkpoint, used for options that a call does not set."""
        self.kernels = kernels
        """The kernels in use, and the reason why they were chosen."""
        self.weights = weights
        """Format of the matrices in memory; "bf16" is as in the checkpoint."""
        self.storage: Storage | None = None
        """The store that weights are streamed from; None if all are in memory."""
        self.steps_per_call: int | None = None
        """Largest number of steps that a session takes in one native call (``Session``)."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        assert self.methods.folder is not None, "an engine is made from a checkpoint"
        return self.methods.folder

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the model's weights take in memory."""
        return sum({part.data_ptr(): part.nbytes for part in self.model.parameters()}.values())

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Result]:
        """Answer prompts in batches; keyword arguments are the fields of ``Options``.

        Args:
            prompts: one prompt or several; a prompt is text or a list of messages.
            options: see ``Options``.

        Returns:
            One result per prompt, in order.

        Raises:
            ConfigError: an option is unknown or out of range, or a prompt is empty.
            CapacityError: a prompt and its answer do not fit the model's context.
        """
        chosen = Options.of(options)
        requests = [self.request(prompt, chosen) for prompt in _as_list(prompts)]
        if not requests:
            return []
        session = self.session(requests, chosen)
        for request in requests:
            session.admit(request)
        answers = [Answer(self.tokenizer, request, chosen.method) for request in requests]
        for emitted in session.drain():
            answers[emitted.request_id].take(emitted)
        return [answer.result() for answer in answers]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Answer one prompt and yield text as soon as it can no longer change; closing the iterator stops decoding."""
        chosen = Options.of(options)
        request = self.request(prompt, chosen)
        session = self.session([request], chosen)
        session.admit(request)
        answer = Answer(self.tokenizer, request, chosen.method)
        for emitted in session.drain():
            text = answer.take(emitted)
            done = answer.result() if emitted.finish_reason else None
            yield Chunk(text, emitted.tokens, done)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V) float32, without a cache."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.model.device)
        if ids.dim() != 2:
            raise ConfigError(f"token_ids must be (batch, length), found {list(ids.shape)}")
        step = Step.dense(*ids.shape)
        flat = self.model.head(self.model.run(self.model.embed(ids.reshape(-1), step), step))
        return flat.view(*ids.shape, -1)

    def request(self, prompt: Prompt, options: Options) -> Request:
        """Return a prompt in tokens together with everything needed to decode it.

        Raises:
            ConfigError: the prompt is empty or a value is out of range.
            CapacityError: prompt and answer do not fit the model's context.
        """
        return self.request_for(self.tokenizer.encode_prompt(prompt, raw=options.raw) if prompt else (), options)

    def request_for(self, prompt_tokens: Sequence[int], options: Options) -> Request:
        """Do the same as ``request`` for a prompt that is already in tokens."""
        tokens = tuple(prompt_tokens)
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one character")
        context = self.model.config.max_positions
        if len(tokens) >= context:
            raise CapacityError(f"the prompt has {len(tokens)} tokens; the context of this model holds {context}")
        limit, stops = self._limit(options, len(tokens)), self._stop_strings(options)
        if options.min_new_tokens > limit:
            raise ConfigError(f"min_new_tokens is {options.min_new_tokens}, more than the {limit} tokens at most")
        stop = StopRule(
            end_tokens=frozenset(() if options.ignore_eos else self.tokenizer.eos_ids),
            stop_strings=stops,
            detokenize=self.tokenizer.decode if stops else None,
            min_new_tokens=options.min_new_tokens,
        )
        request = Request(
            tokens=tokens,
            max_new_tokens=limit,
            drafter=self.methods.drafter(options.method, options.num_draft_tokens, options.quality),
            sampling=self.sampling(options),
            stop=stop,
            seed=options.seed,
            logprobs=options.logprobs,
        )
        request.check_fits(context)
        return request

    def session(self, requests: Sequence[Request], options: Options) -> Session:
        """Return a session with room for these requests."""
        num_slots = min(len(requests), options.batch_size)
        capacity = max(len(r.tokens) + r.max_new_tokens for r in requests)
        if self.storage is not None:
            num_slots = self.storage.num_slots(num_slots, capacity)
        return Session(
            self.model,
            num_slots=num_slots,
            capacity=capacity,
            row_count=EXACT_ROWS if options.exact else 1,
            steps_per_call=self.steps_per_call,
            progress=options.progress,
        )

    def _limit(self, options: Options, num_prompt_tokens: int) -> int:
        """Return the largest number of new tokens: the one asked for, or else the checkpoint's or the default, if they
        fit.
        """
        if options.max_new_tokens is not None:
            return options.max_new_tokens
        room = self.model.config.max_positions - num_prompt_tokens
        if "max_new_tokens" in self.defaults:
            return min(room, int(self.defaults["max_new_tokens"]))
        if "max_length" in self.defaults:
            return min(room, max(1, int(self.defaults["max_length"]) - num_prompt_tokens))
        return min(room, DEFAULT_NEW_TOKENS)

    def _stop_strings(self, options: Options) -> tuple[str, ...]:
        """Return the stop strings of the options, or else of the checkpoint."""
        stops = options.stop_strings if options.stop_strings is not None else self.defaults.get("stop_strings", ())
        return (stops,) if isinstance(stops, str) else tuple(stops)

    def sampling(self, options: Options) -> Sampling:
        """Return the sampling settings of the options, or else of the checkpoint.

        Giving a temperature or another setting that only affects sampling turns sampling on.

        Raises:
            ConfigError: such a setting was given together with ``do_sample=False``.
        """
        values = {}
        for field in dataclasses.fields(Sampling):
            given = getattr(options, field.name)
            values[field.name] = self.defaults.get(field.name, field.default) if given is None else given
        asked = [name for name in _SAMPLES_ONLY if getattr(options, name) is not None]
        if asked and options.temperature != 0:
            if options.do_sample is False:
                raise ConfigError(f"{asked[0]} has no effect on greedy decoding; leave it out, or drop do_sample=False")
            values["do_sample"] = True
        return Sampling(**values)


class Answer:
    """Turns the tokens of one request into text, and holds back what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request, method: str) -> None:
        """Start an answer without tokens; ``method`` is the name that was asked for."""
        self._request = request
        self._method = method
        self._stops = request.stop.stop_strings
        self._stream: TextStream = tokenizer.stream()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pending = ""
        self._text = ""
        self._last: Emitted | None = None

    def take(self, emitted: Emitted) -> str:
        """Add the tokens of a step and return the text that can no longer change."""
        self._tokens += emitted.tokens
        self._logprobs += emitted.logprobs or ()
        self._last = emitted
        ended = emitted.finish_reason is not None
        self._pending += self._stream.push(emitted.tokens) + (self._stream.finish() if ended else "")
        if ended:
            certain = self._cut_at_stop(self._pending)
        else:
            held = _possible_start(self._pending, self._stops)
            certain = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(certain) :]
        self._text += certain
        return certain

    def _cut_at_stop(self, text: str) -> str:
        """Return the text before the first stop string."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def result(self) -> Result:
        """Return the finished answer."""
        assert self._last is not None
        assert self._last.finish_reason is not None
        return Result(
            text=self._text,
            token_ids=tuple(self._tokens),
            logprobs=tuple(self._logprobs) if self._request.logprobs else None,
            finish_reason=self._last.finish_reason,
            stats=self._last.stats,
            method=self._method,
            choice=self._last.stats.choice,
        )


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], Mapping):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

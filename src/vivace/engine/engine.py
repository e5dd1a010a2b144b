"""An engine: a model ready to answer prompts, with its drafters and the texts that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vivace.adapters.guard.guard import TextGuard, guarded
from vivace.adapters.guard.untrusted import encoded
from vivace.adapters.lora import draft_weights_of
from vivace.adapters.pool.pool import AUTO, PromptPool, behind
from vivace.adapters.registry import Registry
from vivace.answer import Answer, Chunk, Result
from vivace.checkpoint.codes import note_on
from vivace.checkpoint.generation import check_named_tokens
from vivace.checkpoint.load import check_has_no_encoder, read_config
from vivace.checkpoint.tokenizer import Tokenizer, forced_first
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter, Prefix
from vivace.core.step import Step
from vivace.decode.prefill import Prefill
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Lead, Request, StopRule
from vivace.decode.session import Session
from vivace.engine.prompts import Prompt, as_ids, as_prompt, as_prompts
from vivace.engine.sources import SourceChoice
from vivace.errors import CapacityError, ConfigError, UnsupportedError
from vivace.kernels.choice import KernelChoice
from vivace.methods.composition import Methods, adapters_by_method
from vivace.methods.table import check_method
from vivace.options import Options
from vivace.parallel.world import World
from vivace.prefill.choice import Prefills
from vivace.storage.loading import Storage
from vivace.storage.prompt_cache.cache import MAX_BYTES, PromptCache, facts_of
from vivace.units import parse_bytes

EXACT_ROWS = 64
"""Number of rows of every decoding pass in exact mode, enough for drafts of up to 63 tokens."""


class Engine:
    """A model ready to answer. It keeps its drafters, and what ``auto`` has measured, between calls."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        methods: Methods,
        defaults: Mapping[str, Any],
        kernels: KernelChoice,
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
        self.sources = SourceChoice("shared", "")
        """What is kept of a source by a model with an encoder, and the reason."""
        self.steps_per_call: int | None = None
        """Largest number of steps that a session takes in one native call (``Session``)."""
        self.memory = methods.memory
        """Counts the memory of weights and drafters, and what is promised to texts."""
        self.adapters = Registry(model, methods.folder, methods.memory)
        """LoRAs that calls may name."""
        self._methods_of = WeakIdKeyDictionary()
        """Drafters for texts with a LoRA, by what the registry knows of it, and as long as it knows it."""
        self.prefills = Prefills(model, methods.folder)
        """Ways to read prompts, by their settings."""
        self.prefix_cache: PrefixCache | None = None
        """Entries of prompts that were read, shared by all calls."""
        self.prompt_cache: PromptCache | None = None
        """The same on disk, shared with later processes."""
        self.guard: TextGuard | None = None
        """What judges prompts and answers; None for nothing."""
        self.prompt_pool: PromptPool | None = None
        """Soft prompts, of which each request gets one; None for none."""
        self.world: World | None = None
        """The ranks that compute this model together; None for a model on one machine."""
        self.ignored_config_keys: tuple[str, ...] = ()
        """Unknown keys of ``config.json`` that were ignored because the caller said so."""

    @property
    def notes(self) -> list[str]:
        """What is unusual about the checkpoint and may surprise, one line each; commands print them."""
        raw, size = read_config(self.folder), self.model.config.vocab_size
        found = [f"config.json: {key} = {raw.get(key)!r} is ignored, as you asked" for key in self.ignored_config_keys]
        if self.adapters.default is not None:
            found.append(f"worn by default: adapters/{self.adapters.default}, which recovers what few bits have lost")
        return found + note_on(self.folder, self.weights, self.model.dtype, self.model) + self.tokenizer.notes(size)

    def check_has_no_encoder(self) -> None:
        """Raise an UnsupportedError if the model is an encoder-decoder, for callers that can use decoders only."""
        check_has_no_encoder(self.model.config)

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        assert self.methods.folder is not None, "an engine is made from a checkpoint"
        return self.methods.folder

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the model's weights take in memory."""
        return sum({part.data_ptr(): part.nbytes for part in self.model.parameters()}.values())

    def new_prefix_cache(self, max_bytes: int) -> PrefixCache:
        """Make a cache of this model's texts, which gives its memory back when running ones need it.

        Raises:
            UnsupportedError: what this model computes depends on tokens that it has read before.
        """
        if self.model.stateful:
            raise UnsupportedError(
                "a store of neurons keeps no prompts, as it has to read them; leave out prefix_cache"
            )
        cache = PrefixCache.of(self.model, max_bytes)
        self.memory.may_evict(cache)
        return cache

    def open_prompt_cache(
        self, folder: str | Path, *, is_read_only: bool = False, max_bytes: str | int | None = None
    ) -> None:
        """Keep texts in a folder on disk, and find them there.

        Args:
            folder: made if it is not there.
            is_read_only: whether texts are found there and none is added.
            max_bytes: most bytes of the folder, such as "4GiB"; None is that.

        Raises:
            ConfigError: the folder cannot be made, or the limit has no room for one block, or has no effect.
            NotFoundError: it is only to be read, and not there.
            UnsupportedError: what this model computes depends on tokens that it has read before.
        """
        if self.model.stateful:
            raise UnsupportedError(
                "a store of neurons keeps no prompts, as it has to read them; leave out prompt_cache"
            )
        if is_read_only and max_bytes is not None:
            raise ConfigError("prompt_cache_bytes has no effect on a cache that is only read; leave it out")
        if str(folder) in ("", "."):
            raise ConfigError("prompt_cache needs the name of a folder of its own")
        limit = MAX_BYTES if max_bytes is None else parse_bytes(max_bytes)
        facts = facts_of(self.model, self.folder, self.weights)
        path = Path(folder).expanduser()
        self.prompt_cache = PromptCache(self.model, path, facts, max_bytes=limit, is_read_only=is_read_only)
        self.memory.may_evict(self.prompt_cache)

    def methods_of(self, adapter: str | None) -> Methods:
        """Return the drafters for texts that wear a LoRA: with the draft weights that were trained over it, if there
        are any, else the base's.

        Raises:
            CheckpointError: its draft weights are broken, or of another base.
            NotFoundError: there is no such LoRA.
        """
        if adapter is None:
            return self.methods
        known = self.adapters.find(adapter)
        if known not in self._methods_of:
            folders, base = draft_weights_of(known.folder), self.methods
            own = adapters_by_method(folders, base.folder)
            if own:
                every, memory = {**base.adapters, **own}, self.memory
                made = Methods(self.model, base.folder, every, base.second, base.plan, memory=memory)
                made.remembers = base.remembers
            self._methods_of[known] = made if own else base
        return cast(Methods, self._methods_of[known])

    def drafting_by(self, methods: Methods) -> Engine:
        """Return a copy that has other drafters, also for texts that wear a LoRA; all else is shared."""
        other = copy(self)
        other.methods, other._methods_of = methods, WeakIdKeyDictionary()
        return other

    def prefix(
        self, memory: PrefixCache | None, salt: str | None = None, owner: bytes = b"", *, lead: Lead | None = None
    ) -> Prefix | None:
        """Return the kept texts that requests of an owner with a salt see: those in memory, those on disk, or None.
        Texts behind a soft prompt, ``lead``, are not kept on disk.
        """
        part = None if memory is None else memory.salted(salt, owner)
        if self.prompt_cache is None or lead is not None:
            return part
        return self.prompt_cache.behind(part, salt, owner)

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Result]:
        """Answer prompts in batches; keyword arguments are the fields of ``Options``.

        Args:
            prompts: one prompt or several; a prompt is text, a list of messages, or a list or array of token
                ids.
            options: see ``Options``.

        Returns:
            One result per prompt, in order.

        Raises:
            ConfigError: an option is unknown or out of range, or a prompt is empty or no prompt.
            CapacityError: a prompt and its answer do not fit the model's context.
        """
        chosen, asked = Options.of(options), as_prompts(prompts)
        requests = [self.request(prompt, each) for prompt, each in zip(asked, chosen.apart(len(asked)), strict=True)]
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
        """Answer one prompt and yield text as soon as it can no longer change; closing the iterator stops decoding.

        What ``generate`` refuses is refused by this call, before the first piece is asked for.
        """
        chosen = Options.of(options)
        return self.answer(self.request(prompt, chosen), chosen)

    def answer(self, request: Request, options: Options) -> Iterator[Chunk]:
        """Do the same as ``stream`` for a request that is made."""
        session = self.session([request], options)
        session.admit(request)
        answer = Answer(self.tokenizer, request, options.method)
        for emitted in session.drain():
            text = answer.take(emitted)
            done = answer.result() if emitted.finish_reason else None
            yield Chunk(text, emitted.tokens, done)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[Sequence[int]] | Tensor, *, adapter: str | None = None) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V) float32, without a cache.

        Args:
            token_ids: texts of one length.
            adapter: name of a LoRA that all of them wear; None is the model as it is, with the LoRA that recovers it.

        Raises:
            ConfigError: there are no tokens, or foreign ones, or the texts differ in their lengths, or ``adapter`` is
                no name.
            CapacityError: the texts are longer than the model's context.
            UnsupportedError: the model is an encoder-decoder.
        """
        if self.model.encoder is not None:
            raise UnsupportedError("logits of a text depend on its source in an encoder-decoder model; use generate")
        ids, config = as_ids(token_ids).to(self.model.device), self.model.config
        for row in ids.tolist():
            self.tokenizer.check_ids(row, config.vocab_size)
        if ids.shape[1] > config.max_positions:
            raise CapacityError(
                f"the text has {ids.shape[1]} tokens; the context of this model holds {config.max_positions}"
            )
        step = Step.dense(*ids.shape, device=ids.device)
        name = None if adapter is None else Options(adapter=adapter).one_adapter
        if (worn := self.adapters.worn(name)) is not None:
            step = replace(step, deltas=(worn.bank.deltas(torch.zeros_like(step.slot)),))
        flat = self.model.head(self.model.run(self.model.embed(ids.reshape(-1), step), step))
        return flat.view(*ids.shape, -1)

    def request(self, prompt: Prompt, options: Options) -> Request:
        """Return a prompt in tokens together with everything needed to decode it.

        Raises:
            ConfigError: the prompt is empty or no prompt, or a value is out of range.
            CapacityError: prompt and answer do not fit the model's context.
            UnsupportedError: the prompt is a text or messages, and the checkpoint has no tokenizer.
        """
        prompt = as_prompt(prompt)
        return self.request_for(encoded(prompt, self.tokenizer, raw=options.raw) if prompt else (), options)

    def request_for(self, prompt_tokens: Sequence[int], options: Options, *, is_open: bool = False) -> Request:
        """Do the same as ``request`` for a prompt that is already in tokens; with ``is_open`` the answer may be shorter
        than ``max_new_tokens`` where a soft prompt takes the room, as it may where there is no such limit.
        """
        given = tuple(prompt_tokens)
        self._check_prompt(given, options)
        source, tokens = (None, given) if self.model.encoder is None else (given, (options.start(self.defaults),))
        context = self.model.config.max_positions
        if len(tokens) >= context:
            raise CapacityError(f"the prompt has {len(tokens)} tokens; the context of this model holds {context}")
        limit = options.limit(self.defaults, self.model.config.room(len(tokens)), len(tokens))
        beams = options.beams(self.defaults)
        prefill, reason = self._prefill(options, len(tokens))
        request = Request(
            tokens=tokens,
            max_new_tokens=limit,
            drafter=prefill.drafter or self._drafter(options, is_plain=beams is not None or source is not None),
            sampling=self.sampling(options),
            stop=self._stop_rule(options, options.least(self.defaults, limit, len(tokens))),
            seed=options.seed,
            logprobs=options.logprobs,
            prefill=prefill,
            prefill_reason=reason,
            beams=beams,
            source=source,
            barred=tuple(word[0] for word in self.defaults.get("bad_words_ids", ())),
            forced_first=self._forced_first(options) if len(tokens) == 1 else None,
            forced_last=self.defaults.get("forced_eos_token_id"),
            adapter=self.adapters.worn(None if options.adapter is None else options.one_adapter),
            prefix=self.prefix(self.prefix_cache),
        )
        request = self._behind_soft_prompt(request, options, is_open=is_open)
        if self.guard is not None:
            request = guarded(request, self.guard)
        request.check_fits(context)
        request.check_rotation(self.model.config)
        request.check_source(self.model.config)
        return request

    def _check_prompt(self, tokens: Sequence[int], options: Options) -> None:
        """Refuse a prompt without tokens or with foreign ones, and options that this model cannot follow."""
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one character")
        num_tokens, reads_sources = self.model.config.vocab_size, self.model.encoder is not None
        self.tokenizer.check_ids(tokens, num_tokens)
        check_named_tokens(self.defaults, num_tokens, reads_sources=reads_sources)
        if not reads_sources and options.forced_bos_token_id is not None:
            raise ConfigError("forced_bos_token_id is for encoder-decoder models; let the prompt end with that token")

    def _stop_rule(self, options: Options, least: int) -> StopRule:
        """Return what ends an answer; ``least`` is its shortest length in tokens."""
        stops = self.stop_strings(options)
        if stops and self.tokenizer.is_missing:
            raise UnsupportedError("this checkpoint has no tokenizer, so a text cannot end it; leave out stop_strings")
        return StopRule(
            end_tokens=frozenset(() if options.ignore_eos else self.tokenizer.eos_ids),
            stop_strings=stops,
            detokenize=self.tokenizer.decode if stops else None,
            min_new_tokens=least,
        )

    def _drafter(self, options: Options, *, is_plain: bool) -> Drafter:
        """Return the drafter of the method asked for, or of plain decoding, trained for the LoRA that is worn."""
        methods = self.methods_of(None if options.adapter is None else options.one_adapter)
        return methods.drafter("plain" if is_plain else options.method, options.num_draft_tokens, options.quality)

    def _prefill(self, options: Options, num_tokens: int) -> tuple[Prefill, str | None]:
        """Return how a prompt of so many tokens is read, and why so where there was a choice."""
        prefill, reason = self.prefills.of(options.reading, num_tokens)
        if options.prefill != "full":
            check_method(options.method, options.prefill, is_alone=prefill.drafter is not None)
        if not prefill.is_exact and self.prompt_cache is not None:
            self.prompt_cache.tell_pruned(prefill.name)
        return prefill, reason

    def _forced_first(self, options: Options) -> int | None:
        """Return the token with which an answer has to begin, of the options or else of the checkpoint."""
        asked, size = options.forced_bos_token_id, self.model.config.vocab_size
        return forced_first(asked, self.defaults, self.tokenizer, size)

    def _behind_soft_prompt(self, request: Request, options: Options, *, is_open: bool) -> Request:
        """Put a request behind the soft prompt that it gets of the pool, where there is one."""
        if self.prompt_pool is None:
            if options.soft_prompt != AUTO:
                raise ConfigError(f"soft_prompt is {options.soft_prompt!r}, and there is no pool; give prompt_pool")
            return request
        request = behind(request, self.prompt_pool, options.soft_prompt)
        request = replace(request, prefix=self.prefix(self.prefix_cache, lead=request.lead))
        if is_open or options.max_new_tokens is None:
            room = max(1, self.model.config.max_positions - len(request.tokens) - request.num_leading)
            request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        return request

    def session(self, requests: Sequence[Request], options: Options) -> Session:
        """Return a session with room for these requests."""
        num_slots = min(len(requests), options.batch_size)
        capacity = max(r.num_entries for r in requests)
        return Session(
            self.model,
            num_slots=num_slots,
            capacity=capacity,
            row_count=EXACT_ROWS if options.exact else 1,
            steps_per_call=self.steps_per_call,
            memory=self.memory,
            progress=options.progress,
        )

    @property
    def num_beams(self) -> int:
        """Number of beams with which the checkpoint searches where nothing else is asked for, 1 where it does not."""
        return int(self.defaults.get("num_beams", 1))

    def stop_strings(self, options: Options) -> tuple[str, ...]:
        """Return the stop strings of the options, or else of the checkpoint."""
        stops = options.stop_strings if options.stop_strings is not None else self.defaults.get("stop_strings", ())
        return (stops,) if isinstance(stops, str) else tuple(stops)

    def sampling(self, options: Options) -> Sampling:
        """Return the sampling settings of the options, or else of the checkpoint; see ``Options.sampling``."""
        return options.sampling(self.defaults)

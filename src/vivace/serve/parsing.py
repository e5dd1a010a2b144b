"""Turns the fields of a body into requests for the session."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vivace.adapters.pool.pool import NONE as NO_SOFT_PROMPT
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.seams import Drafter
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Processor, Request
from vivace.engine import Engine, Options
from vivace.methods.table import check_method
from vivace.serve.api_error import APIError
from vivace.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from vivace.serve.catalog import Catalog
from vivace.serve.grammar import Bind, binds, bound
from vivace.serve.grammars import Grammars
from vivace.serve.processors import LogitBias, Penalties
from vivace.serve.prompts import Prompts, Unread
from vivace.serve.tool_reader import ToolReader
from vivace.serve.tools import Tools
from vivace.serve.validation import fields_of

SEEDED = "lookup"
"""Method used in place of ``auto`` for a text with a seed that depends on what is drafted for it. Its guesses use no
random numbers, so the text does not depend on when the server chose to draft."""

_SAY_LIMIT = frozenset({"max_new_tokens", "max_length"})
"""Keys of ``generation_config.json`` that limit the length of answers."""


@dataclass(frozen=True)
class ParsedRequest:
    """One HTTP request in the session's terms: ``n`` requests for each of its prompts."""

    model: str
    method: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    """By prompt, then by choice."""
    tokenizer: Tokenizer
    """Turns the tokens of answers into text."""
    reader: Callable[[], ToolReader | None] = lambda: None
    """Makes the reader that finds tool calls in an answer."""


@dataclass(frozen=True)
class Begun:
    """A request whose parsing has begun."""

    body: GenerationBody
    prompts: tuple[Unread, ...]
    """Tokens, or texts that take long to tokenize."""
    binds: tuple[Bind, ...] = ()
    """Grammars of the answers, once they are compiled."""

    @property
    def takes_long(self) -> bool:
        """Return whether ``RequestParser.go_on`` has work to do."""
        is_strict = isinstance(self.body, ChatBody) and self.body.is_strict
        return self.body.is_bound or is_strict or any(isinstance(prompt, str) for prompt in self.prompts)


class Verbatim(Tokenizer):
    """A tokenizer whose texts show special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class RequestParser:
    """Turns the bodies of HTTP requests into requests to decode, for one engine."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        prompts: Prompts,
        prefix: PrefixCache | None,
        max_model_len: int,
        default_max_tokens: int | None = None,
        reading: Options | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            engine: the base model.
            catalog: models that may be named.
            prompts: reads prompts.
            prefix: entries of earlier prompts.
            max_model_len: prompt and answer together, in tokens.
            default_max_tokens: longest answer of requests that do not say; None is what the checkpoint says, else what
                the prompt leaves of ``max_model_len``.
            reading: says how prompts are read of requests that do not say; None is in full.
        """
        self.engine = engine
        self.catalog = catalog
        self.max_model_len = max_model_len
        self.default_max_tokens = default_max_tokens
        self.prompts = prompts
        self.grammars = Grammars(engine.tokenizer, engine.model.config.vocab_size)
        self._prefix = prefix
        self._reading = Options() if reading is None else reading
        self._verbatim = Verbatim(engine.tokenizer.inner, engine.tokenizer.eos_ids)
        self._tools = Tools(engine.tokenizer, self.grammars)
        self._drafters = threading.Lock()

    # The three stages of a request; each is called in one of the threads that are there for it.

    def begin(self, kind: type[GenerationBody], raw: bytes) -> Begun:
        """Fields and prompts of a request, as far as that is quickly done.

        Args:
            kind: which fields there are.
            raw: the JSON.

        Raises:
            UsageError: a field that this model or server cannot follow; a ``APIError`` names it.
        """
        body = fields_of(kind, raw)
        self.catalog.find(body.model)
        if isinstance(body, ChatBody):
            unread = self.prompts.of_chat(body)
        else:
            assert isinstance(body, CompletionBody)
            unread = self.prompts.of_completion(body)
        special = isinstance(body, CompletionBody)
        read = [one if self.prompts.is_long(one) else self.prompts.tokens(one, special=special) for one in unread]
        return Begun(body, tuple(read))

    def go_on(self, begun: Begun, owner: bytes) -> Begun:
        """Do the part of parsing that takes long: compile grammars and tokenize long texts.

        Raises:
            APIError: a schema is invalid or not supported, or a text could not be tokenized.
        """
        special = isinstance(begun.body, CompletionBody)
        tokens = tuple(self.prompts.tokens(one, special=special) for one in begun.prompts)
        return replace(begun, prompts=tokens, binds=self.bindings(begun.body, owner))

    def finish(self, begun: Begun, owner: bytes) -> ParsedRequest:
        """Requests for the session.

        Args:
            begun: what the stages before gave.
            owner: whose request it is; prompts are cached for each owner alone.

        Raises:
            UsageError: a field that this model or server cannot follow; a ``APIError`` names it.
        """
        parsed = self._parsed(begun, owner, begun.body.method)
        if parsed.method == "auto" and begun.body.seed is not None and not all(map(self._is_settled, parsed.requests)):
            return self._parsed(begun, owner, SEEDED)
        return parsed

    def _is_settled(self, request: Request) -> bool:
        """Return whether the text of a request with a seed is the same whatever is drafted for it: it is greedy, or
        drawn with noise that depends on the seed, the position and the token only (``core/draws.py``).
        """
        chain = self.engine.model.backend.chain
        by_position = chain is not None and chain.draws_by_position
        return request.sampling.is_greedy or (request.is_drawn_from_logits and by_position)

    def _parsed(self, begun: Begun, owner: bytes, method: str | None) -> ParsedRequest:
        """Return the requests of a body, decoded with a method; None takes the model's own."""
        body, prompts = begun.body, [list(prompt) for prompt in begun.prompts if not isinstance(prompt, str)]
        assert len(prompts) == len(begun.prompts), "long texts are tokenized by now"
        if isinstance(body, ChatBody):
            num_top = body.top_logprobs if body.logprobs else None
            parsed = self._requests_of(body, owner, prompts, body.limit, num_top, method)
            parsed = self._with_tools(parsed, body) if body.reads_calls else parsed
        else:
            assert isinstance(body, CompletionBody)
            limit = 1 if body.max_tokens == 0 else body.max_tokens  # nothing to write: only the prompts are scored
            parsed = self._requests_of(body, owner, prompts, limit, body.logprobs, method)
        return replace(parsed, requests=bound(parsed.requests, begun.binds))

    def to_tokenize(self, raw: bytes) -> tuple[str, bool]:
        """Return the text of ``/tokenize``, and whether it gets the tokenizer's own leading and trailing tokens.

        Raises:
            UsageError: a field is wrong.
        """
        body = fields_of(TokenizeBody, raw)
        self.catalog.find(body.model)
        if body.messages is None:
            return body.prompt or "", body.add_special_tokens
        return self.prompts.conversation(body.messages, add_generation_prompt=body.add_generation_prompt), False

    def to_detokenize(self, raw: bytes) -> list[int]:
        """Return the tokens of ``/detokenize``.

        Raises:
            UsageError: a field is wrong.
        """
        body = fields_of(DetokenizeBody, raw)
        self.catalog.find(body.model)
        return body.tokens

    def bindings(self, body: GenerationBody, owner: bytes) -> tuple[Bind, ...]:
        """Return what binds the answers to grammars, each compiled once for all of them.

        Args:
            body: the fields.
            owner: whose request it is.

        Raises:
            APIError: a schema that is wrong, or cannot be kept to.
        """
        found = self._tools.bindings(body, owner) if isinstance(body, ChatBody) and body.reads_calls else ()
        if body.response_format is None or body.response_format.type == "text":
            return found
        named = body.response_format.json_schema
        schema = {"type": "object"} if named is None else named.schema_
        return (*found, binds(self.grammars.json_schema(schema, owner), "response_format"))

    def _with_tools(self, parsed: ParsedRequest, body: ChatBody) -> ParsedRequest:
        """Return the same request, with its answers read for tool calls."""
        form = self._tools.form()
        only_one, names = not body.parallel_tool_calls, frozenset(tool.function.name for tool in body.tools)
        tokenizer = self._tools.tokenizer if body.skip_special_tokens else self._verbatim
        return replace(
            parsed,
            requests=_stopping(self._tools.ending(parsed.requests, form, body), tokenizer),
            tokenizer=tokenizer,
            reader=lambda: ToolReader(form, only_one=only_one, names=names),
        )

    def _requests_of(
        self,
        body: GenerationBody,
        owner: bytes,
        prompts: list[list[int]],
        limit: int | None,
        num_top: int | None,
        method: str | None,
    ) -> ParsedRequest:
        """Make the requests, with log p of ``num_top`` tokens per position, or without log-probabilities
        if it is None, decoded with a method, or with the model's own if that is None.
        """
        model = self.catalog.find(body.model)
        if self.engine.model.encoder is not None and getattr(body, "echo", False):
            raise APIError(400, "echo is for models that continue a prompt; it is the source of this one", param="echo")
        options = self._options(body, limit, num_top is not None)
        if self.engine.prompt_pool is not None and self.catalog.is_lora(model):
            options = replace(options, soft_prompt=NO_SOFT_PROMPT)  # they were trained on the base alone
        is_plain = options.beams(self.engine.defaults) is not None or self.engine.model.encoder is not None
        if is_plain and body.method not in (None, "auto", "plain"):
            raise APIError(400, f"method {body.method} drafts for one text without a source", param="method")
        method = self.catalog.method(model, "plain" if is_plain else method)
        if options.prefill != "full":
            check_method(method, options.prefill)
        with self._drafters:  # they are made when they are first asked for
            drafter = self.catalog.drafter(model, method, body.num_draft_tokens, body.quality)
        seed = random.getrandbits(62) if body.seed is None else body.seed
        bias = (LogitBias(self._bias(body)),) if body.logit_bias else ()
        requests = []
        for tokens in prompts:
            self._check_length(len(tokens), limit, body)
            first = self._request(body, tokens, options, drafter)
            prefix = self.engine.prefix(self._prefix, body.cache_salt, owner, lead=first.lead)
            processors = self._processors(body, len(first.tokens), bias)
            prefix = None if first.source is not None else prefix
            first = replace(first, num_top_logprobs=num_top or 0, processors=processors, prefix=prefix)
            requests += [
                replace(first, seed=seed + choice, adapter=self.catalog.source(model))  # each waits for its own
                for choice in range(body.num_texts)
            ]
        tokenizer = self.engine.tokenizer if body.skip_special_tokens else self._verbatim
        return ParsedRequest(model, method, tuple(map(tuple, prompts)), _stopping(requests, tokenizer), tokenizer)

    def _check_length(self, num_prompt_tokens: int, limit: int | None, body: GenerationBody) -> None:
        """Raise an error for prompt and answer that do not fit, in terms of the request's fields."""
        if self.engine.model.encoder is not None:
            num_prompt_tokens = 1  # the text begins with its start token; the source has a limit of its own
        prompt = "messages" if isinstance(body, ChatBody) else "prompt"
        asked = "max_completion_tokens" if isinstance(body, ChatBody) and body.max_completion_tokens else "max_tokens"
        needed = num_prompt_tokens + (limit or 1)
        if needed > self.max_model_len:
            answer = f"{asked} is {limit}" if limit else "the answer has one at least"
            raise APIError(
                400,
                f"{prompt} has {num_prompt_tokens} tokens and {answer}, together {needed}; this server holds "
                f"{self.max_model_len}; shorten one of them",
                param=prompt if limit is None or num_prompt_tokens >= self.max_model_len else asked,
                code="context_length_exceeded",
            )
        if limit is not None and (body.min_tokens or 0) > limit:
            raise APIError(400, f"min_tokens is {body.min_tokens}, more than {asked}, {limit}", param="min_tokens")

    def _options(self, body: GenerationBody, limit: int | None, wants_logprobs: bool) -> Options:
        default = self._reading
        return Options(
            max_new_tokens=limit,
            min_new_tokens=0 if body.is_bound else body.min_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0) if body.top_k is not None else None,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            stop_strings=body.stops if body.is_bound or body.stop is not None else None,
            ignore_eos=body.ignore_eos,
            logprobs=wants_logprobs,
            method="plain",
            **_beams(body, wants_logprobs),
            prefill=default.prefill if body.prefill is None else body.prefill,
            **{
                name: getattr(default, name)
                if body.prefill is None and getattr(body, name) is None
                else getattr(body, name)
                for name in ("keep", "min_prompt", "decode_keep")
            },
        )

    def _request(self, body: GenerationBody, tokens: list[int], options: Options, drafter: Drafter) -> Request:
        """Make one request; if the body sets no limit, its answer may fill the rest of a slot."""
        self.prompts.check_tokens(body.stop_token_ids, "stop_token_ids")
        longest = self.engine.memory.longest_text(self.engine.model, drafter, self.max_model_len)
        count = len(tokens) if self.engine.model.encoder is None else 1
        room = max(1, min(longest, self.engine.model.config.room(count)) - count)
        is_open = options.max_new_tokens is None
        if (beams := options.beams(self.engine.defaults)) is not None:
            entries = self.max_model_len * self.engine.num_beams  # of a slot, which all beams share
            room = max(1, min(room, (entries - count) // beams.num_beams))
        says_limit = self.engine.model.encoder is not None or _SAY_LIMIT & self.engine.defaults.keys()
        if is_open and (self.default_max_tokens is not None or not says_limit):
            options = replace(options, max_new_tokens=min(self.default_max_tokens or room, room))
        with self._drafters:
            request = self.engine.request_for(tokens, options, is_open=is_open)
        if is_open:
            request = replace(request, max_new_tokens=min(request.max_new_tokens, max(1, room - request.num_leading)))
        request.check_fits(self.max_model_len)
        if request.prefill.drafter is not None and body.method is not None:  # a server's own method gives way
            check_method(body.method, options.prefill, is_alone=True)
        return replace(
            request,
            drafter=request.prefill.drafter or drafter,
            stop=replace(request.stop, end_tokens=request.stop.end_tokens | set(body.stop_token_ids)),
            shows_guesses=body.return_trace,
        )

    @staticmethod
    def _processors(body: GenerationBody, num_prompt_tokens: int, bias: tuple[LogitBias, ...]) -> tuple[Processor, ...]:
        """Return the processors of the request other than a grammar."""
        if body.presence_penalty or body.frequency_penalty:
            return (Penalties(num_prompt_tokens, body.presence_penalty, body.frequency_penalty), *bias)
        return bias

    def _bias(self, body: GenerationBody) -> dict[int, float]:
        if wrong := [key for key in body.logit_bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
            raise APIError(400, f"logit_bias has the key {wrong[0][:100]!r}; keys are token ids", param="logit_bias")
        bias = {int(key): value for key, value in body.logit_bias.items()}
        self.prompts.check_tokens(list(bias), "logit_bias")
        return bias


def _beams(body: GenerationBody, wants_logprobs: bool) -> dict[str, Any]:
    """Return the options of a search, or that there is none where something is asked for that only one text has."""
    if not isinstance(body, CompletionBody) or not body.use_beam_search:
        reads_calls = isinstance(body, ChatBody) and body.reads_calls
        is_single = body.n > 1 or body.is_bound or reads_calls or wants_logprobs or body.return_trace
        return {"num_beams": 1} if body.draw_fields or is_single else {}
    asked = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping}
    return {"num_beams": body.num_beams, "num_return_sequences": body.n, **asked}


def _stopping(requests: Iterable[Request], tokenizer: Tokenizer) -> tuple[Request, ...]:
    """Return the same requests, whose stop texts are looked for in the text that the client gets."""
    return tuple(
        replace(request, stop=replace(request.stop, detokenize=tokenizer.decode))
        if request.stop.stop_strings
        else request
        for request in requests
    )

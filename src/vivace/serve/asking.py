"""From the fields of a body to requests the session takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.seams import Drafter, Prefix
from vivace.decode.request import Processor, Request
from vivace.engine import Engine, Options
from vivace.serve.bodies import ChatBody, CompletionBody, GenerationBody, Message
from vivace.serve.catalog import Catalog
from vivace.serve.grammar import Grammars
from vivace.serve.prefix import PrefixCache
from vivace.serve.processors import Bias, Penalties
from vivace.serve.refusal import Refusal
from vivace.serve.tool_reader import ToolReader
from vivace.serve.tools import Tools

_SAY_LIMIT = frozenset({"max_new_tokens", "max_length"})
"""Keys of ``generation_config.json`` that bound answers."""


@dataclass(frozen=True)
class Ask:
    """What one HTTP request asks for: ``n`` requests for each of its prompts."""

    model: str
    method: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    """Prompt by prompt, choice by choice."""
    tokenizer: Tokenizer
    """Writes the text."""
    reader: Callable[[], ToolReader | None] = lambda: None
    """Makes what finds calls of tools in an answer."""


class Verbatim(Tokenizer):
    """Writes special tokens too."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class Asking:
    """Reads bodies for one engine."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        prefix: PrefixCache | None,
        max_model_len: int,
        default_max_tokens: int | None = None,
    ) -> None:
        """Read the chat template.

        Args:
            engine: the base model.
            catalog: models that may be named.
            prefix: entries of earlier prompts.
            max_model_len: prompt and answer together, in tokens.
            default_max_tokens: longest answer of requests that do not say; None is what the checkpoint says, else what
                the prompt leaves of ``max_model_len``.
        """
        self.engine = engine
        self.catalog = catalog
        self.max_model_len = max_model_len
        self.default_max_tokens = default_max_tokens
        self._prefix = prefix
        self._grammars = Grammars(engine.tokenizer, engine.model.config.vocab_size)
        self._verbatim = Verbatim(engine.tokenizer.inner, engine.tokenizer.eos_ids)
        self._tools = Tools(engine.tokenizer, self._grammars)
        self._template_words = template_words(engine.tokenizer)

    def chat(self, body: ChatBody, owner: bytes) -> Ask:
        """Requests for a conversation.

        Args:
            body: the fields.
            owner: whose request it is; prompts are cached for each owner alone.

        Raises:
            UsageError: a field that this model or server cannot follow; a ``Refusal`` names it.
        """
        template = dict(body.chat_template_kwargs)
        if body.reads_calls:
            template["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        self._check_template(template, body)
        if body.continue_final_message:
            template["continue_final_message"] = True
        tokens = self.conversation(
            body.messages, add_generation_prompt=not body.continue_final_message, template=template
        )
        num_top = body.top_logprobs if body.logprobs else 0
        ask = self._ask(body, owner, [tokens], body.limit, wants_logprobs=body.logprobs, num_top=num_top)
        return self._with_tools(ask, body) if body.reads_calls else ask

    def _with_tools(self, ask: Ask, body: ChatBody) -> Ask:
        """The same, its answers read for calls, and bound to them where one is forced."""
        form = self._tools.form()
        only_one = not body.parallel_tool_calls
        return replace(
            ask,
            requests=self._tools.bound(ask.requests, form, body),
            tokenizer=self._tools.tokenizer if body.skip_special_tokens else self._verbatim,
            reader=lambda: ToolReader(form, only_one=only_one),
        )

    def completion(self, body: CompletionBody, owner: bytes) -> Ask:
        """Requests for prompts that are taken as they are.

        Args:
            body: the fields.
            owner: whose request it is; prompts are cached for each owner alone.

        Raises:
            UsageError: a field that this model or server cannot follow; a ``Refusal`` names it.
        """
        prompts = [self._tokens(prompt) for prompt in body.prompts]
        limit = 1 if body.max_tokens == 0 else body.max_tokens  # nothing to write: only the prompts are scored
        wants = body.logprobs is not None
        return self._ask(body, owner, prompts, limit, wants_logprobs=wants, num_top=body.logprobs or 0)

    def conversation(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, template: dict[str, Any] | None = None
    ) -> list[int]:
        """Tokens of messages through the chat template."""
        values: Any = [message.template_values() for message in messages]
        tokenizer = self.engine.tokenizer
        text = tokenizer.prompt_text(values, add_generation_prompt=add_generation_prompt, **(template or {}))
        return tokenizer.encode(text, special=False)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        self.check_tokens(prompt, "prompt")
        return prompt

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuse tokens that this model does not have."""
        vocab = self.engine.model.config.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise Refusal(400, f"{param} names token {wrong[0]}; this model has tokens 0 to {vocab - 1}", param=param)

    def _check_template(self, template: dict[str, Any], body: ChatBody) -> None:
        for name in template:
            if name not in self._template_words or name in ("messages", "add_generation_prompt"):
                param = "tools" if name == "tools" and body.tools else "chat_template_kwargs"
                raise Refusal(
                    400,
                    f"{param}: the chat template of this model does not read {name[:100]!r}; leave it out",
                    param=param,
                )

    def _ask(
        self,
        body: GenerationBody,
        owner: bytes,
        prompts: list[list[int]],
        limit: int | None,
        *,
        wants_logprobs: bool,
        num_top: int,
    ) -> Ask:
        model = self.catalog.find(body.model)
        options = self._options(body, limit, wants_logprobs)
        draws = not self.engine.sampling(options).is_greedy
        method = self.catalog.method(model, body.method, is_seeded=draws and body.seed is not None)
        drafter = self.catalog.drafter(model, method, body.num_draft_tokens, body.quality)
        seed = random.getrandbits(62) if body.seed is None else body.seed
        prefix = None if self._prefix is None else self._prefix.salted(body.cache_salt, owner)
        requests = []
        for tokens in prompts:
            self._check_length(len(tokens), limit, body)
            first = self._request(body, tokens, options, drafter, prefix)
            first = replace(first, num_top_logprobs=num_top if wants_logprobs else 0)
            requests += [
                replace(first, seed=seed + choice, processors=self._processors(body, len(tokens)))
                for choice in range(body.n)
            ]
        return Ask(
            model,
            method,
            tuple(map(tuple, prompts)),
            tuple(requests),
            self.engine.tokenizer if body.skip_special_tokens else self._verbatim,
        )

    def _check_length(self, num_prompt_tokens: int, limit: int | None, body: GenerationBody) -> None:
        """Refuse what does not fit, in the words of the request."""
        prompt = "messages" if isinstance(body, ChatBody) else "prompt"
        asked = "max_completion_tokens" if isinstance(body, ChatBody) and body.max_completion_tokens else "max_tokens"
        needed = num_prompt_tokens + (limit or 1)
        if needed > self.max_model_len:
            answer = f"{asked} is {limit}" if limit else "the answer has one at least"
            raise Refusal(
                400,
                f"{prompt} has {num_prompt_tokens} tokens and {answer}, together {needed}; this server holds "
                f"{self.max_model_len}; shorten one of them",
                param=prompt if limit is None or num_prompt_tokens >= self.max_model_len else asked,
                code="context_length_exceeded",
            )
        if limit is not None and body.min_tokens > limit:
            raise Refusal(400, f"min_tokens is {body.min_tokens}, more than {asked}, {limit}", param="min_tokens")

    def _options(self, body: GenerationBody, limit: int | None, wants_logprobs: bool) -> Options:
        return Options(
            max_new_tokens=limit,
            min_new_tokens=body.min_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0) if body.top_k is not None else None,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            stop_strings=body.stops if body.stop is not None else None,
            ignore_eos=body.ignore_eos,
            logprobs=wants_logprobs,
            method="plain",
        )

    def _request(
        self, body: GenerationBody, tokens: list[int], options: Options, drafter: Drafter, prefix: Prefix | None
    ) -> Request:
        """One request, cut to what a slot of this server holds when the body names no limit."""
        self.check_tokens(body.stop_token_ids, "stop_token_ids")
        room = self.max_model_len - len(tokens)
        is_open = options.max_new_tokens is None
        if is_open and (self.default_max_tokens is not None or not _SAY_LIMIT & self.engine.defaults.keys()):
            options = replace(options, max_new_tokens=min(self.default_max_tokens or room, room))
        request = self.engine.request_for(tokens, options)
        if is_open:
            request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        request.check_fits(self.max_model_len)
        return replace(
            request,
            drafter=drafter,
            stop=replace(request.stop, end_tokens=request.stop.end_tokens | set(body.stop_token_ids)),
            shows_guesses=body.return_trace,
            prefix=prefix,
        )

    def _processors(self, body: GenerationBody, num_prompt_tokens: int) -> tuple[Processor, ...]:
        """New ones for every choice: a grammar remembers where it stands."""
        found: list[Processor] = []
        if body.presence_penalty or body.frequency_penalty:
            found.append(Penalties(num_prompt_tokens, body.presence_penalty, body.frequency_penalty))
        if body.logit_bias:
            found.append(Bias(self._bias(body)))
        if body.response_format is not None:
            if body.response_format.type == "json_object":
                found.append(self._grammars.json_object(num_prompt_tokens))
            elif body.response_format.json_schema is not None:
                schema = body.response_format.json_schema.schema_
                found.append(self._grammars.json_schema(schema, num_prompt_tokens))
        return tuple(found)

    def _bias(self, body: GenerationBody) -> dict[int, float]:
        if wrong := [key for key in body.logit_bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
            raise Refusal(400, f"logit_bias has the key {wrong[0][:100]!r}; keys are token ids", param="logit_bias")
        bias = {int(key): value for key, value in body.logit_bias.items()}
        self.check_tokens(list(bias), "logit_bias")
        return bias


def template_words(tokenizer: Tokenizer) -> frozenset[str]:
    """Values that a chat template reads."""
    import jinja2
    from jinja2 import meta

    template = tokenizer.inner.chat_template
    if not isinstance(template, str):
        return frozenset()
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateSyntaxError:  # transformers has tags of its own; what cannot be read is not promised
        return frozenset()

"""Turns messages, texts and token ids into the tokens of prompts; limits that are cheap to check come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vivace.adapters.guard.untrusted import has_untrusted, with_material
from vivace.checkpoint.token_length import longest_token
from vivace.engine import Engine
from vivace.serve.api_error import APIError
from vivace.serve.bodies import ChatBody, CompletionBody
from vivace.serve.body_parts import Message
from vivace.serve.chat_template import message_fields, parsed, template_words
from vivace.serve.long_text import LONG, decode_apart, encode_apart
from vivace.serve.message_fields import check_fields

Unread = str | list[int]
"""A prompt that may still have to be tokenized."""
SET_BY: Mapping[str, str] = {
    "messages": "messages",
    "tools": "tools",
    "add_generation_prompt": "continue_final_message",
    "continue_final_message": "continue_final_message",
}
"""By value that a chat template is given for every conversation: the field of a body that sets it."""


class Prompts:
    """Reads the prompts for one engine."""

    def __init__(self, engine: Engine, max_model_len: int, max_sequences: int) -> None:
        """Look at the tokenizer.

        Args:
            engine: the base model.
            max_model_len: prompt and answer together, in tokens.
            max_sequences: answers that may run and wait.
        """
        self._engine = engine
        self._max_model_len = max_model_len
        self._max_sequences = max_sequences
        self._longest_token = longest_token(engine.tokenizer)
        template = parsed(engine.tokenizer)
        self._template_words, self._message_fields = template_words(template), message_fields(template)

    def of_chat(self, body: ChatBody) -> list[Unread]:
        """Return the text of a conversation.

        Raises:
            UsageError: the chat template does not use some of the values, or the text cannot fit.
        """
        self._check_count(body.n)
        template = dict(body.chat_template_kwargs)
        if body.reads_calls:
            template["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        self._check_template(template, body)
        if body.continue_final_message:
            template["continue_final_message"] = True
        text = self.conversation(
            body.messages, add_generation_prompt=not body.continue_final_message, template=template
        )
        self._check_characters(text, "messages")
        return [text]

    def of_completion(self, body: CompletionBody) -> list[Unread]:
        """Return texts and tokens unchanged.

        Raises:
            APIError: there are no such tokens, or there is more of something than fits.
        """
        prompts = body.prompts
        self._check_count(len(prompts) * body.n)
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_characters(prompt, "prompt")
                continue
            if len(prompt) >= self._max_model_len:
                raise too_long(f"prompt has {len(prompt)} tokens", self._max_model_len, "prompt")
            self.check_tokens(prompt, "prompt")
        return prompts

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the chat template makes of messages.

        Raises:
            UsageError: there is no template, it rejects the messages, or does not read one of their fields.
        """
        if self._engine.tokenizer.has_template:
            check_fields(messages, self._message_fields)
        values: Any = [message.template_values() for message in messages]
        if has_untrusted(values):
            values = with_material(values, self._engine.tokenizer)
        return self._engine.tokenizer.prompt_text(
            values, add_generation_prompt=add_generation_prompt, **(template or {})
        )

    @staticmethod
    def is_long(prompt: Unread) -> bool:
        """Return whether tokenizing this text needs a process of its own (``long_text.py``)."""
        return isinstance(prompt, str) and len(prompt) > LONG

    def tokens(self, prompt: Unread, *, special: bool) -> list[int]:
        """Tokens of a prompt.

        Args:
            prompt: as one of the methods above gave it.
            special: with the tokenizer's own leading and trailing tokens, which a chat template writes itself.

        Raises:
            APIError: a long text could not be tokenized.
        """
        if not isinstance(prompt, str):
            return prompt
        if self.is_long(prompt):
            return encode_apart(self._engine.folder, prompt, special=special)
        return self._engine.tokenizer.encode(prompt, special=special)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            APIError: there are no such tokens, or too many.
        """
        self.check_tokens(tokens, "tokens")
        if len(tokens) > LONG:
            return decode_apart(self._engine.folder, tokens)
        return self._engine.tokenizer.decode(tokens)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise an error for tokens that this model does not have."""
        vocab = self._engine.model.config.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise APIError(400, f"{param} names token {wrong[0]}; this model has tokens 0 to {vocab - 1}", param=param)

    def _check_count(self, num_sequences: int) -> None:
        """Raise an error for more answers than can run and wait."""
        if num_sequences > self._max_sequences:
            raise APIError(
                400,
                f"this request asks for {num_sequences} sequences and this server runs and keeps waiting "
                f"{self._max_sequences}; ask for fewer prompts or a smaller n",
            )

    def _check_characters(self, text: str, param: str) -> None:
        """Raise an error for a text that cannot fit, however few tokens it may have."""
        if self._longest_token is not None and len(text) > self._longest_token * self._max_model_len:
            least = -(-len(text) // self._longest_token)
            raise too_long(f"{param} has {len(text)} characters, at least {least} tokens", self._max_model_len, param)

    def _check_template(self, template: Mapping[str, Any], body: ChatBody) -> None:
        for name in [name for name in body.chat_template_kwargs if name in SET_BY]:
            raise APIError(
                400,
                f"chat_template_kwargs cannot set {name!r}; use the field {SET_BY[name]!r}",
                param="chat_template_kwargs",
            )
        for name in template:
            if name not in self._template_words:
                param = "tools" if name == "tools" and body.tools else "chat_template_kwargs"
                raise APIError(
                    400,
                    f"{param}: the chat template of this model does not read {name[:100]!r}; leave it out",
                    param=param,
                )


def too_long(found: str, max_model_len: int, param: str) -> APIError:
    """Return the error for a prompt that does not fit."""
    return APIError(
        400,
        f"{found}; this server holds {max_model_len} with the answer; shorten it",
        param=param,
        code="context_length_exceeded",
    )

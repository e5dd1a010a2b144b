"""A conversation whose turns read only what is new: the text so far stays stored between them.

In three lines:

    chat = vivace.Conversation(vivace.load("path/or/hub-id"), system="Be brief.")
    print(chat.say("Describe: name[Green Man], food[Indian]").text)
    print(chat.say("And in one word?").text)

A turn's prompt begins with the tokens of the conversation so far, those that were generated exactly as they were, so
all of them are found in the prefix cache (``decode/prefix.py``) and only the new message is read. On kernels that read
prompts in chunks (PyTorch's), whole chunks of earlier prompts are found, and answers are read again. Answers are the
same as without the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vivace.answer import Chunk, Result
from vivace.decode.prefix import PrefixCache
from vivace.engine import Engine, Options
from vivace.errors import CapacityError, ConfigError, shown
from vivace.prompts import Message


class Conversation:
    """Messages between a user and a model, and the tokens that the model has of them."""

    def __init__(self, engine: Engine, *, system: str | None = None, **options: Any) -> None:
        """Begin.

        Args:
            engine: answers.
            system: message that the conversation starts with.
            options: how turns are answered, the fields of ``Options``.

        Raises:
            ConfigError: an option is unknown, out of range or not for conversations, or ``system`` is no text.
        """
        self.engine = engine
        self.options = Options.of(options)
        if self.options.raw:
            raise ConfigError("a conversation is written with the chat template; leave out raw")
        if not isinstance(self.options.adapter, str | None):
            raise ConfigError(f"adapter must be one name here, found {shown(self.options.adapter)}")
        if not isinstance(system, str | None):
            raise ConfigError(f"system must be a text, found {shown(system)}")
        self.opening: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self._prefix: PrefixCache | None = engine.prefix_cache
        if self._prefix is None and not engine.model.stateful:
            self._prefix = engine.new_prefix_cache(sys.maxsize)
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.messages: list[Message] = list(self.opening)
        """What was said so far."""
        self._tokens: tuple[int, ...] = ()
        self._text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._tokens)

    def say(self, message: str) -> Result:
        """Answer a message; the conversation has both afterwards.

        Raises:
            CapacityError: the conversation would be longer than the context; it stays as it is.
        """
        result = None
        for chunk in self.stream(message):
            result = chunk.result
        assert result is not None
        return result

    def stream(self, message: str) -> Iterator[Chunk]:
        """Answer a message and yield text as soon as it can no longer change.

        The conversation has the message and the answer once the answer is complete; of an iterator that is closed
        before, neither.

        Raises:
            CapacityError: the conversation would be longer than the context; it stays as it is.
            ConfigError: the message is no text.
        """
        if not isinstance(message, str):
            raise ConfigError(f"a message must be a text, found {shown(message)}")
        asked: Message = {"role": "user", "content": message}
        text, tokens = self._prompt([*self.messages, asked])
        context = self.engine.model.config.max_positions
        if len(tokens) >= context:
            raise CapacityError(
                f"the conversation has {len(tokens)} tokens with this message and the context holds {context}; "
                "nothing was cut or sent: start over, or say less"
            )
        request = self.engine.request_for(tokens, self.options)
        request = replace(request, prefix=self.engine.prefix(self._prefix, lead=request.lead))
        for chunk in self.engine.answer(request, self.options):
            if chunk.result is not None:
                written = chunk.result.token_ids
                self.messages += [asked, {"role": "assistant", "content": chunk.result.text}]
                self._tokens = (*tokens, *written)
                self._text = text + self.engine.tokenizer.spelled(written)
            yield chunk

    def _prompt(self, messages: list[Message]) -> tuple[str, tuple[int, ...]]:
        """Return the text of messages as the model reads them, and its tokens.

        They are those of the conversation so far with what is new behind them, unless the template writes earlier
        messages in another way now.
        """
        tokenizer = self.engine.tokenizer
        text = tokenizer.prompt_text(messages)
        if self._tokens and text.startswith(self._text):
            return text, (*self._tokens, *tokenizer.encode(text[len(self._text) :], special=False))
        return text, tuple(tokenizer.encode(text, special=False))

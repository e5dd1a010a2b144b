"""Text <-> token ids, chat templates, streaming text, and whether two tokenizers are the same.

A thin layer over transformers' ``AutoTokenizer``; spaces are never cleaned up, so that text streamed in
pieces is the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.checkpoint.files import resolve
from vivace.checkpoint.generation import load_eos_ids
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError, UnsupportedError

Messages = Sequence[Mapping[str, str]]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WAIT = 16
"""Tokens after which bytes that never became a character are shown as they are."""


class Tokenizer:
    """What a checkpoint says about its text."""

    def __init__(self, inner: Any, eos_ids: Sequence[int] = ()) -> None:
        """Wrap a transformers tokenizer.

        Args:
            inner: ``PreTrainedTokenizerBase``.
            eos_ids: end-of-text ids; empty takes the tokenizer's own.
        """
        self.inner = inner
        own = () if inner.eos_token_id is None else (int(inner.eos_token_id),)
        self.eos_ids = tuple(eos_ids) or own

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.inner.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's own leading and trailing tokens unless ``special`` is off."""
        return list(self.inner.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def prompt_text(self, messages: Messages, *, add_generation_prompt: bool = True, **template: Any) -> str:
        """Messages through the chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: end where the assistant's answer begins.
            template: further values for the template (tools, its own switches).

        Raises:
            UnsupportedError: there is no template, or it rejects the messages.
        """
        if not self.has_template:
            raise UnsupportedError("this checkpoint has no chat template; give a plain prompt instead of messages")
        try:
            text: str = self.inner.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=add_generation_prompt, tokenize=False, **template
            )
        except Exception as exc:  # templates are programs of the checkpoint and raise anything
            raise UnsupportedError(f"the chat template rejects these messages: {' '.join(str(exc).split())}") from exc
        return text

    def encode_prompt(self, prompt: str | Messages, *, raw: bool = False) -> list[int]:
        """Token ids of what the model shall continue.

        Args:
            prompt: a text, sent as one user message where there is a chat template, or messages.
            raw: take the text as it is.

        Raises:
            ConfigError: messages that shall be taken as they are.
            UnsupportedError: messages without a chat template.
        """
        if isinstance(prompt, str):
            if raw or not self.has_template:
                return self.encode(prompt)
            return self.encode(self.prompt_text([{"role": "user", "content": prompt}]), special=False)
        if raw:
            raise ConfigError("messages are written with the chat template; give a text to be taken as it is (raw)")
        return self.encode(self.prompt_text(prompt), special=False)

    def stream(self) -> TextStream:
        """A decoder that is fed token by token."""
        return TextStream(self)

    def pieces(self) -> dict[int, str]:
        """Id -> piece as the vocabulary spells it."""
        return {index: piece for piece, index in self.inner.get_vocab().items()}


class TextStream:
    """Turns tokens into text as they come; what it returned, joined, is the text of all of them.

    A character whose bytes are spread over tokens is held back until it is whole, so no replacement
    characters flash up. Tokens are decoded together with those of the text returned last, because how a
    piece is written may depend on what stands before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; may be empty."""
        text = ""
        for index in ids:
            self._ids.append(index)
            text += self._advance(final=False)
        return text

    def finish(self) -> str:
        """What was held back: the stream ends here."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._done])
        text = self._tokenizer.decode(self._ids[self._context :])
        waits = text.endswith(_UNFINISHED) and len(self._ids) - self._done < _LONGEST_WAIT
        if len(text) <= len(shown) or (waits and not final):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(shown) :]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory or Hub id, with its end-of-text ids.

    Raises:
        NotFoundError: no tokenizer files there.
        CorruptError: they cannot be read.
    """
    from transformers import AutoTokenizer

    folder = resolve(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise NotFoundError(f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as exc:  # the tokenizers library raises bare Exception on malformed files
        raise CorruptError(f"the tokenizer of {folder} cannot be read: {' '.join(str(exc).split())[:300]}") from exc
    return Tokenizer(inner, load_eos_ids(folder))


def require_same_pieces(first: Tokenizer, second: Tokenizer) -> None:
    """Refuse two tokenizers that spell an id differently.

    Only ids that both have are compared: one vocabulary may be padded, or end earlier.

    Raises:
        MismatchError: names the first differing ids and both spellings.
    """
    ours, theirs = first.pieces(), second.pieces()
    common = min(max(ours, default=-1), max(theirs, default=-1)) + 1
    wrong = [index for index in range(common) if ours.get(index) != theirs.get(index)]
    if wrong:
        shown = ", ".join(f"{i}: {ours.get(i)!r} / {theirs.get(i)!r}" for i in wrong[:3])
        raise MismatchError(f"the tokenizers differ in {len(wrong)} of {common} common ids ({shown})")

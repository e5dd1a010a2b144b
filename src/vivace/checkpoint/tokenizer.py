"""Text to token ids and back, chat templates, streaming text, and comparison of two tokenizers.

A thin layer over transformers' tokenizers. Spaces are never cleaned up, so that text streamed in
pieces is the same text as decoding all ids at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vivace.checkpoint.files import VOCABULARIES, resolve
from vivace.checkpoint.generation import load_eos_ids
from vivace.checkpoint.tokenizer_class import open_tokenizer
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError, UnsupportedError
from vivace.prompts import is_unicode

Messages = Sequence[Mapping[str, str]]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WAIT = 16
"""Number of tokens after which bytes that have not become a character are shown as they are."""

_END_OF_IDS = 2**32
"""The tokenizers library cannot be asked for ids from here on."""


class Tokenizer:
    """The tokenizer of a checkpoint: text to ids, ids to text, and the chat template."""

    def __init__(self, inner: Any, eos_ids: Sequence[int] = ()) -> None:
        """Wrap a tokenizer of transformers.

        Args:
            inner: a ``PreTrainedTokenizerBase``.
            eos_ids: end-of-text ids; if empty, the tokenizer's own.
        """
        self.inner = inner
        own = () if inner.eos_token_id is None else (int(inner.eos_token_id),)
        self.eos_ids = tuple(eos_ids) or own

    @property
    def is_missing(self) -> bool:
        """Return whether the checkpoint has no tokenizer, so that only token ids go in and out."""
        return isinstance(self.inner, NoTokenizer)

    @property
    def has_template(self) -> bool:
        """Return whether there is a chat template."""
        return bool(self.inner.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokenizer's own leading and trailing tokens unless ``special`` is
        off. A text may be longer than the model reads: whoever hands it to the model compares lengths.

        Raises:
            ConfigError: the text has a lone surrogate; the message says where.
        """
        if not is_unicode(text):
            place = next(place for place, letter in enumerate(text) if not is_unicode(letter))
            before = f" after {text[max(0, place - 20) : place]!r}" if place else ""
            raise ConfigError(f"the text is not valid Unicode: there is {text[place]!r}{before}; take it out")
        return list(self.inner.encode(text, add_special_tokens=special, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as a prompt has it, with special tokens."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def prompt_text(self, messages: Messages, *, add_generation_prompt: bool = True, **template: Any) -> str:
        """Write messages with the chat template.

        Args:
            messages: mappings ``{"role": ..., "content": ...}``.
            add_generation_prompt: whether to end where the assistant's answer begins.
            template: further values for the template (tools, switches that it defines).

        Raises:
            UnsupportedError: there is no template, or it rejects the messages.
        """
        if self.is_missing:
            raise UnsupportedError(NO_TOKENIZER)
        if not self.has_template:
            raise UnsupportedError("this checkpoint has no chat template; give a plain prompt instead of messages")
        try:
            text: str = self.inner.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=add_generation_prompt, tokenize=False, **template
            )
        except Exception as exc:  # templates are programs of the checkpoint and raise anything
            raise UnsupportedError(f"the chat template rejects these messages: {' '.join(str(exc).split())}") from exc
        return text

    def encode_prompt(self, prompt: str | Messages | Sequence[int], *, raw: bool = False) -> list[int]:
        """Return the token ids that the model is to continue.

        Args:
            prompt: messages; a text, which becomes one user message if there is a chat template; or token ids, which
                stay as they are.
            raw: whether to take the text as it is, without the template.

        Raises:
            ConfigError: messages were given together with ``raw``.
            UnsupportedError: messages were given and there is no chat template.
        """
        if isinstance(prompt, str):
            if raw or not self.has_template:
                return self.encode(prompt)
            return self.encode(self.prompt_text([{"role": "user", "content": prompt}]), special=False)
        if isinstance(prompt[0], int):
            return list(cast("Sequence[int]", prompt))
        if raw:
            raise ConfigError("messages are written with the chat template; give a text to be taken as it is (raw)")
        return self.encode(self.prompt_text(cast("Messages", prompt)), special=False)

    def check_ids(self, ids: Sequence[int], num_tokens: int) -> None:
        """Refuse ids that a model of so many tokens does not have, which its tokenizer may have all the same.

        Raises:
            ConfigError: there is such an id; the message says where and how it is spelt.
        """
        for place, index in enumerate(ids):
            if not 0 <= index < num_tokens:
                piece = self.inner.convert_ids_to_tokens(index) if 0 <= index < _END_OF_IDS else ""
                spelt = f" ({piece!r})" if piece else ""
                raise ConfigError(
                    f"token {place + 1} of the prompt is {index}{spelt}; this model has tokens 0 to {num_tokens - 1}"
                )

    def notes(self, num_tokens: int) -> list[str]:
        """Return what is unusual about the tokenizer of a model of so many tokens, one line each."""
        if self.is_missing:
            return ["this checkpoint has no tokenizer: token ids go in, and token ids come out"]
        found = [] if self.has_template else ["this checkpoint has no chat template: prompts are read as they are"]
        if len(self.inner) > num_tokens:
            found.append(
                f"the tokenizer has {len(self.inner)} tokens and the model {num_tokens}: a prompt with one of the "
                "others is refused"
            )
        return found

    def id_of(self, piece: str) -> int | None:
        """Return the id of a token as the tokenizer spells it, None if there is no such token."""
        found = self.inner.convert_tokens_to_ids(piece)
        return found if found is not None and self.inner.convert_ids_to_tokens(found) == piece else None

    def stream(self) -> TextStream:
        """Return a decoder that turns tokens into text as they come."""
        return TextStream(self)

    def pieces(self) -> dict[int, str]:
        """Return the spelling of each id in the vocabulary."""
        return {index: piece for piece, index in self.inner.get_vocab().items()}


NO_TOKENIZER = "this checkpoint has no tokenizer, so a text cannot be read; give token ids"
"""Message where a text is given to a model that has no tokenizer."""


class NoTokenizer:
    """Stands where a checkpoint has no tokenizer: ids have no text, and a text cannot be read."""

    eos_token_id = None
    chat_template = None
    all_special_ids: Sequence[int] = ()
    all_special_tokens: Sequence[str] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Refuse the text, since there is no tokenizer.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(NO_TOKENIZER)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the empty text."""
        return ""

    def convert_ids_to_tokens(self, index: int) -> str:
        """Return the empty spelling."""
        return ""

    def convert_tokens_to_ids(self, piece: str) -> int | None:
        """Return None: no piece is known."""
        return None

    def get_vocab(self) -> dict[str, int]:
        """Return an empty vocabulary."""
        return {}


class TextStream:
    """Turns tokens into text as they come; the returned texts, joined, are the text of all tokens.

    A character whose bytes are spread over several tokens is held back until it is complete, so that no replacement
    characters appear. Tokens are decoded together with those of the text returned last, because the spelling of
    a piece may depend on the text before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    @property
    def is_waiting(self) -> bool:
        """Return whether the last tokens have no text yet: they are part of a character, or have none at all."""
        return self._done < len(self._ids)

    def copy(self) -> TextStream:
        """Return a decoder of a text that begins with all tokens that this one has."""
        other = TextStream(self._tokenizer)
        other._ids, other._context, other._done = list(self._ids), self._context, self._done
        return other

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that can no longer change; it may be empty."""
        text = ""
        for index in ids:
            self._ids.append(index)
            text += self._advance(final=False)
        return text

    def finish(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        """Return the text that is new since the last call; unless ``final``, an incomplete character is held back."""
        shown = self._tokenizer.decode(self._ids[self._context : self._done])
        text = self._tokenizer.decode(self._ids[self._context :])
        waits = text.endswith(_UNFINISHED) and len(self._ids) - self._done < _LONGEST_WAIT
        if len(text) <= len(shown) or (waits and not final):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(shown) :]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory or Hub id, with its end-of-text ids.

    Raises:
        NotFoundError: there are no tokenizer files.
        CorruptError: the files cannot be read.
    """
    folder = resolve(path)
    if not _has_tokenizer(folder):
        raise NotFoundError(f"{folder} has no tokenizer ({', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]})")
    try:
        inner = open_tokenizer(folder)
    except Exception as exc:  # the tokenizers library raises bare Exception on malformed files
        raise CorruptError(f"the tokenizer of {folder} cannot be read: {' '.join(str(exc).split())[:300]}") from exc
    return Tokenizer(inner, load_eos_ids(folder))


def find_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint, or one that stands for none if there are no tokenizer files.

    Raises:
        CorruptError: the files cannot be read.
    """
    folder = resolve(path)
    return load_tokenizer(folder) if _has_tokenizer(folder) else Tokenizer(NoTokenizer(), load_eos_ids(folder))


def forced_first(
    asked: int | str | None, defaults: Mapping[str, Any], tokenizer: Tokenizer, num_tokens: int
) -> int | None:
    """Return the token that a text has to begin with: the one asked for, else the checkpoint's, else None.

    Args:
        asked: an id, or a token as the tokenizer spells it.
        defaults: generation settings of the checkpoint.
        tokenizer: knows the spellings.
        num_tokens: of the model.

    Raises:
        ConfigError: there is no such token.
    """
    named = defaults.get("forced_bos_token_id") if asked is None else asked
    found = tokenizer.id_of(named) if isinstance(named, str) else named
    if named is not None and (found is None or not 0 <= found < num_tokens):
        raise ConfigError(f"forced_bos_token_id is {named!r}; this model has no such token (0 to {num_tokens - 1})")
    return found


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def require_same_pieces(first: Tokenizer, second: Tokenizer) -> None:
    """Check that two tokenizers spell every id the same way.

    Only ids that both have are compared, since one vocabulary may be padded or end earlier.

    Raises:
        MismatchError: some ids differ; the message names the first of them and both spellings.
        UnsupportedError: one of them is missing, so that nothing can be compared.
    """
    if first.is_missing or second.is_missing:
        raise UnsupportedError("a model without tokenizer cannot draft, or be drafted for: its tokens are not known")
    ours, theirs = first.pieces(), second.pieces()
    common = min(max(ours, default=-1), max(theirs, default=-1)) + 1
    wrong = [index for index in range(common) if ours.get(index) != theirs.get(index)]
    if wrong:
        shown = ", ".join(f"{i}: {ours.get(i)!r} / {theirs.get(i)!r}" for i in wrong[:3])
        raise MismatchError(f"the tokenizers differ in {len(wrong)} of {common} common ids ({shown})")

"""What callers hand in as prompts or token ids: the forms that Python code has them in, made those of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vivace.errors import ConfigError, shown

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, which becomes one user message unless ``raw``, a list of messages, or a list of token ids."""


def as_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or several as a list, whose items ``as_prompt`` takes or refuses."""
    plain = _plain(prompts)
    if not _is_list(plain):
        return [plain]
    first = _plain(plain[0]) if plain else ""
    return list(plain) if isinstance(first, str) or _is_list(first) else [plain]


def as_prompt(prompt: Any) -> Prompt:
    """Return a text, a list of messages, or token ids as integers, which numpy and PyTorch may have in arrays.

    Raises:
        ConfigError: it is none of them, or a message has no role or no text.
    """
    plain = _plain(prompt)
    if isinstance(plain, str):
        return plain
    if _is_list(plain):
        items = [_plain(item) for item in plain]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, Mapping) for item in items):
            return [_message(number, item) for number, item in enumerate(items, 1)]
    raise ConfigError(f"a prompt must be a text, a list of messages or a list of token ids, found {shown(plain)}")


def _message(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is one text.

    Chat templates drop other content, or print it as Python spells it. An assistant's message with tool calls may have
    no content, which is an empty text.

    Raises:
        ConfigError: it has no role or no text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"message {number} needs a role (a text), found {shown(message)}")
    if isinstance(content, str):
        return message
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {**message, "content": ""}
    parts: list[Any] = list(content) if isinstance(content, Sequence) and _is_list(content) else [content]
    texts = [part["text"] for part in parts if _is_text_part(part)]
    if not parts or len(texts) < len(parts):
        raise ConfigError(
            f"message {number} cannot be read: content must be a text or a list of text parts, found {shown(message)}"
        )
    return {**message, "content": "".join(texts)}


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a message is a text, marked as one."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def as_ids(token_ids: Any) -> Tensor:
    """Return the token ids of texts of one length, (B, T) int64, where they were or else on the processor.

    Raises:
        ConfigError: they are no integers, the lengths differ, or there are none.
    """
    try:
        ids = torch.as_tensor(token_ids)
        is_whole = ids.dtype != torch.bool and (not ids.is_floating_point() or bool((ids == ids.trunc()).all()))
    except (OverflowError, RuntimeError, TypeError, ValueError):  # whatever PyTorch says of what is no array of numbers
        is_whole = False
    if not is_whole:
        raise ConfigError(f"token_ids must be texts of one length, as integers, found {shown(token_ids)}")
    if ids.dim() != 2:
        raise ConfigError(f"token_ids must be (batch, length), found {list(ids.shape)}")
    if not ids.numel():
        raise ConfigError(f"token_ids has no tokens: its shape is {list(ids.shape)}")
    return ids.to(torch.int64)


def _plain(value: Any) -> Any:
    """Return an array of numpy, PyTorch or pandas as a list, and a number of theirs as Python's."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def _is_list(value: Any) -> bool:
    """Return whether something is a list, and neither a text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)

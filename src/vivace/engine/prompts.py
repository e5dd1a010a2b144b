"""What callers hand in as prompts or token ids: the forms that Python code has them in, made those of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

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
        ConfigError: it is none of them.
    """
    plain = _plain(prompt)
    if isinstance(plain, str):
        return plain
    if _is_list(plain):
        items = [_plain(item) for item in plain]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, Mapping) for item in items):
            return cast("Sequence[Mapping[str, str]]", items)
    raise ConfigError(f"a prompt must be a text, a list of messages or a list of token ids, found {shown(plain)}")


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

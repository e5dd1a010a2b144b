"""Prompt sets for the commands that run many prompts: a file, or the name of a set that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.errors import ConfigError
from vivace.prompts import PACKAGED, Prompt, load_prompts, packaged_prompts

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import BenchmarkPrompt

Prompts = Annotated[
    str, typer.Option("--prompts", help=f"A .jsonl file, or a packaged set: {', '.join(PACKAGED)}.", metavar="FILE|SET")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first so many prompts.", min=1)]


def read_prompts(source: str, limit: int | None) -> list[Prompt]:
    """Read the first ``limit`` prompts of a packaged set or a file.

    Raises:
        CheckpointError: there is no such file, or it is not a prompt file.
        ConfigError: a row is not a prompt.
    """
    is_packaged = source in PACKAGED and not Path(source).exists()
    return (packaged_prompts(source) if is_packaged else load_prompts(source))[:limit]


def questions_of(engine: Engine, prompts: list[Prompt], *, raw: bool) -> list[BenchmarkPrompt]:
    """Return prompts together with the token ids that the model reads."""
    from vivace.adapters.guard.untrusted import encoded
    from vivace.evaluate.benchmark import BenchmarkPrompt

    asked = [prompt.request for prompt in prompts]
    return [BenchmarkPrompt(request, tuple(encoded(request, engine.tokenizer, raw=raw))) for request in asked]


def split_names(text: str) -> list[str]:
    """Split ``"plain, lookup"`` into a list of names; empty text gives an empty list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_numbers(text: str, flag: str, *, least: int = 1) -> list[int]:
    """Split ``"512, 2k"`` into numbers; a k behind one multiplies it by 1024.

    Raises:
        ConfigError: one is no number or below ``least``, or there is none; the message names the flag.
    """
    found = []
    for word in split_names(text) or [text]:
        digits = word.removesuffix("k")
        if not digits.isdecimal() or int(digits) < least:
            raise ConfigError(f"{flag} has {word!r}; write numbers from {least} on with commas, such as 512,2k")
        found.append(int(digits) * (1024 if word.endswith("k") else 1))
    return found

"""Prompt sets as the commands that run many prompts take them: a file, or a name of the package's own sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.prompts import PACKAGED, Prompt, load_prompts, packaged_prompts

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import BenchmarkPrompt

Prompts = Annotated[
    str, typer.Option("--prompts", help=f"A .jsonl file, or a packaged set: {', '.join(PACKAGED)}.", metavar="FILE|SET")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first so many prompts.", min=1)]


def read_prompts(source: str, limit: int | None) -> list[Prompt]:
    """Prompts of a packaged set or a file.

    Raises:
        CheckpointError: no such file, or not a prompt file.
        ConfigError: a row is not a prompt.
    """
    is_packaged = source in PACKAGED and not Path(source).exists()
    return (packaged_prompts(source) if is_packaged else load_prompts(source))[:limit]


def questions_of(engine: Engine, prompts: list[Prompt], *, raw: bool) -> list[BenchmarkPrompt]:
    """Prompts beside what the model reads."""
    from vivace.evaluate.benchmark import BenchmarkPrompt

    encode = engine.tokenizer.encode_prompt
    return [BenchmarkPrompt(prompt.request, tuple(encode(prompt.request, raw=raw))) for prompt in prompts]


def split_names(text: str) -> list[str]:
    """``"plain, lookup"`` as a list; empty text is no names."""
    return [name.strip() for name in text.split(",") if name.strip()]

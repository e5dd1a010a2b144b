"""``vivace chat``: a conversation with the model, one line per turn."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.generate import show
from vivace.cli.loading import open_engine
from vivace.errors import CapacityError
from vivace.prompts import is_unicode

HELP = "/reset starts over, /exit ends (or Ctrl-D)"
ENDS = ("/exit", "/quit", "/bye")
"""What ends a conversation; people come with the words of other programs."""
"""The commands that a line may be instead of a message."""


@options.grouped
def chat(
    *,
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="System message the conversation starts with.")] = None,
    method: options.Method = "auto",
    load: options.LoadFlags,
    use: options.Use = None,
    soft_prompt: options.SoftPrompt = None,
    guard: options.GuardFiles = None,
    store: options.StoreFlags,
    cache: options.PromptCacheFlags,
    reading: options.PrefillFlags,
    max_new_tokens: options.MaxNewTokens = None,
    sampling: options.SamplingFlags,
) -> None:
    """Talk with a model; every turn sees the whole conversation, and reads what is new of it."""
    from vivace.conversation import Conversation

    engine = open_engine(model, [method], load, store, cache, use=use, guard=guard)
    settings = options.given(
        max_new_tokens=max_new_tokens,
        method=method,
        adapter=use,
        soft_prompt=soft_prompt,
        **vars(reading),
        **vars(sampling),
    )
    conversation = Conversation(engine, system=system or None, **settings)
    console.note(HELP)
    while (line := _read_line()) is not None:
        if line in ENDS:
            break
        if not is_unicode(line):
            console.note("that line is not valid Unicode; nothing was sent")
        elif line == "/reset":
            conversation.reset()
            console.note("started over")
        elif line.startswith("/"):
            console.note(f"no command {line.split()[0]}; {HELP}")
        elif line:
            try:
                show(conversation.stream(line))
            except CapacityError as error:
                console.note(str(error))


def _read_line() -> str | None:
    """Read the next line without surrounding space; None at the end of input."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() if line else None

"""``vivace convert``: a checkpoint as one file for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.opening import folder_of
from vivace.errors import ConfigError
from vivace.units import format_bytes

SUFFIX = ".gguf"


def convert(
    output: Annotated[Path, typer.Argument(help="File to write; its name ends in .gguf.", metavar="OUT")],
    model: options.Model = None,
    kind: Annotated[
        str,
        typer.Option(
            "--type", help="How matrices are stored: auto (as in the checkpoint), f32, f16, bf16, q8_0, q4_0."
        ),
    ] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Write a Llama checkpoint as GGUF, the file that llama.cpp runs.

    bf16 keeps every bit of a bfloat16 checkpoint. q8_0 and q4_0 take 8.5 and 4.5 bits a weight and change the model a
    little.
    """
    from vivace.checkpoint.gguf import write_checkpoint

    if output.suffix != SUFFIX:
        raise ConfigError(f"{output} does not end in {SUFFIX}, the one format that is written; name the file so")
    with console.progress("writing"):
        written = write_checkpoint(folder_of(model), output, kind)
    if not written.splits_text_alike:
        console.note(
            "llama.cpp does not know how this tokenizer splits text and will use its default: the same text may "
            "become other tokens; give token ids where that matters"
        )
    if as_json:
        console.json({"file": str(written.path), "type": written.kind, "bytes": written.num_bytes})
    else:
        console.result(f"{written.path}: {written.kind}, {format_bytes(written.num_bytes)}")

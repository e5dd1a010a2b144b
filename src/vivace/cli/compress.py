"""``vivace compress``: write a checkpoint whose matrices take two to four bits a weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import folder_of
from vivace.errors import ConfigError
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.palette.compress import CompressConfig, Compressed
    from vivace.palette.texts import Texts

DEFAULT_TOKENS = 16384
"""Tokens of text that a model is rounded for, unless said otherwise."""


def compress(
    output: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    model: options.Model = None,
    bits: Annotated[
        int | None,
        typer.Option(help="Bits of every matrix: 2, 3 or 4, or 8 without a palette. Left out: 3, without --data 4."),
    ] = None,
    bpw: Annotated[
        float | None,
        typer.Option(help="Bits a weight instead, codebooks and scales included: each matrix gets 2, 3, 4 or 8."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="rtn (even steps), kmeans (weighted by inputs), fisher (by squared gradients), gptq. Left out: gptq, "
            "without --data kmeans."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text to round for: prompts with references (.jsonl) or plain text; repeatable."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of it to use; an eighth more is held back. Left out: {DEFAULT_TOKENS}.",
            min=64,
        ),
    ] = None,
    longest: Annotated[int | None, typer.Option(help="Tokens of a row of text; left out: 512.", min=8)] = None,
    entries: Annotated[
        str, typer.Option(help="Of palettes: int8 (with a scale for each output and 64 inputs) or bfloat16.")
    ] = "int8",
    ends: Annotated[str, typer.Option(help="Embedding and head: int8, or keep as they are stored.")] = "int8",
    as_json: options.AsJson = False,
) -> None:
    """Write a checkpoint in few bits; it is given to --model like any other.

    Below 4 bits text is needed, best of the kind that the model is for; without it no model says anything sensible.
    """
    from vivace.palette.compress import CompressConfig
    from vivace.palette.compress import compress as write
    from vivace.palette.rounding import METHODS

    _one_of("--entries", entries, ("int8", "bfloat16"))
    _one_of("--ends", ends, ("int8", "keep"))
    if bits is None and bpw is None:
        bits = 4 if data is None else 3
    if data is None and (tokens is not None or longest is not None):
        raise ConfigError("--tokens and --longest are of a text to round for; give --data FILE, or leave them out")
    if bits == 8 and entries != "int8":
        raise ConfigError("--entries are those of palettes, and 8 bits are integers with a scale; leave it out")
    if method is None:
        method = "kmeans" if data is None and bits in (4, 8) else "gptq"
    if method == "edkm":
        raise ConfigError(
            "edkm trains, for longer than a command that rounds: vivace train palette --out OUT --data FILE"
        )
    _one_of("--method", method, METHODS)
    config = CompressConfig(bits, bpw, method, has_scales=entries == "int8", rounds_ends=ends == "int8")  # type: ignore[arg-type]
    folder = folder_of(model)
    texts = None if data is None else _texts(folder, data, tokens or DEFAULT_TOKENS, longest or 512)
    with console.progress("rounding") as progress:
        made = write(folder, output, config, texts, note=console.note, progress=progress)
    if as_json:
        console.json(_facts(made, config))
    else:
        _print(made, config)


def _texts(folder: Path, data: list[Path], tokens: int, longest: int) -> Texts:
    from vivace.checkpoint.load import load_config
    from vivace.checkpoint.tokenizer import load_tokenizer
    from vivace.palette.texts import read_texts

    longest = min(longest, load_config(folder).max_positions)
    return read_texts(data, load_tokenizer(folder), num_tokens=tokens, longest=longest, tokens_per_batch=2048)


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    from vivace.errors import nearest

    if value not in known:
        raise ConfigError(f"{flag} is {value!r}{nearest(value, known)}")


def _facts(made: Compressed, config: CompressConfig) -> dict[str, object]:
    return {
        "folder": str(made.written.folder),
        "method": config.method,
        "bytes": made.written.num_bytes,
        "bits_a_weight": made.written.all_bits,
        "bits_a_matrix_weight": made.written.matrix_bits,
        "predicted_kl": made.predicted,
        "measured": None if made.measured is None else asdict(made.measured),
        "matrices": dict(made.bits),
    }


def _print(made: Compressed, config: CompressConfig) -> None:
    written = made.written
    counts = Counter(made.bits.values())
    by = f", by {config.method}" if set(counts) != {8} else ""  # integers are rounded in one way
    listed = ", ".join(f"{counts[bits]} in {bits} bits" for bits in sorted(counts))
    console.result(
        f"{written.folder}: {format_bytes(written.num_bytes)}, {written.all_bits:.2f} bits a weight over all of it"
    )
    console.result(f"  matrices of the layers: {listed}; {written.matrix_bits:.2f} bits a weight{by}")
    if made.predicted is not None:
        console.result(f"  predicted divergence from the stored model: {made.predicted:.4f} nats a token")
    if made.measured is not None:
        kl, loss, stored = made.measured.kl, made.measured.loss, made.measured.stored_loss
        console.result(f"  measured on text held back: {kl:.4f} nats a token; loss {loss:.4f}, stored {stored:.4f}")

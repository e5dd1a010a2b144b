"""``vivace batch``: answer every line of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine


@options.grouped
def batch(
    *,
    source: Annotated[Path, typer.Argument(help="Prompts: one a line, or .jsonl; .gz may follow.", metavar="IN")],
    output: Annotated[
        Path,
        typer.Argument(
            help="Answers in the same order; .jsonl says how each ended, and has the scores of beams. .gz packs them.",
            metavar="OUT",
        ),
    ],
    model: options.Model = None,
    method: options.Method = "auto",
    load: options.LoadFlags,
    store: options.StoreFlags,
    max_new_tokens: options.MaxNewTokens = None,
    raw: options.Raw = False,
    sampling: options.SamplingFlags,
    beams: options.BeamFlags,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts and answers that are decoded together, for each beam.", min=1)
    ] = 16384,
    workers: Annotated[int, typer.Option(help="Processes that tokenize; 0 does without.", min=0)] = 2,
    as_json: options.AsJson = False,
) -> None:
    """Answer every line of a file, in its order. It can be killed at any time; the same command goes on.

    Prompts are sorted by length while they are decoded. Answers are kept in .OUT.batch until all are there.
    """
    from vivace.batch.run import answer_file
    from vivace.options import Options

    engine = open_engine(model, [method], load, store, reads_sources=True)
    settings = options.given(max_new_tokens=max_new_tokens, method=method, raw=raw, **vars(sampling), **beams.settings)
    with console.progress("answering") as progress:
        done = answer_file(
            engine,
            source,
            output,
            Options.of(settings),
            num_workers=workers,
            batch_tokens=batch_tokens,
            settings=settings
            | {
                "dtype": load.dtype,
                "weights": load.weights,
                "kv": load.kv,
                "recovery": load.recovery,
                "prompt_pool": None if load.prompt_pool is None else str(load.prompt_pool),
                "kernels": engine.kernels.name,
                "attention": engine.sources.name,
            },
            progress=progress,
        )
    rate = done.num_prompts - done.num_answered_before
    if as_json:
        console.json({**vars(done), "output": str(output)})
        return
    console.note(
        f"{done.num_prompts} prompts, {done.num_answered_before} of them answered before; {done.num_tokens} tokens, "
        f"{rate / max(done.seconds, 1e-9):.2f} prompts/s in all"
    )

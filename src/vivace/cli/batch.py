"""``vivace batch``: answer every line of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine

if TYPE_CHECKING:
    from vivace.batch.stock import StockComparison


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
    compare_stock: Annotated[
        int | None,
        typer.Option(
            help="Then answer the first K prompts with transformers too, in memory of its own, and compare.",
            metavar="K",
            min=1,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer every line of a file, in its order. It can be killed at any time; the same command goes on.

    Prompts are sorted by length while they are decoded. Answers are kept in .OUT.batch until all are there.
    """
    from vivace.batch.run import answer_file, read_prompts
    from vivace.options import Options

    engine = open_engine(model, [method], load, store, reads_sources=True)
    settings = options.given(max_new_tokens=max_new_tokens, method=method, raw=raw, **vars(sampling), **beams.settings)
    chosen = Options.of(settings)
    stock = None
    if compare_stock is not None:
        from vivace.batch.stock import Stock

        stock = Stock(engine, chosen)  # what cannot be compared is said before anything is answered
    with console.progress("answering") as progress:
        done = answer_file(
            engine,
            source,
            output,
            chosen,
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
    compared = None
    if stock is not None:
        with console.progress("comparing with transformers") as progress:
            compared = stock.compare(read_prompts(source)[:compare_stock], progress)
    rate = done.num_prompts - done.num_answered_before
    if as_json:
        found = {**vars(done), "output": str(output)}
        console.json(found if compared is None else {**found, "stock": vars(compared)})
        return
    console.note(
        f"{done.num_prompts} prompts, {done.num_answered_before} of them answered before; {done.num_tokens} tokens, "
        f"{rate / max(done.seconds, 1e-9):.2f} prompts/s in all"
    )
    if compared is not None:
        console.note(_comparison(compared))


def _comparison(found: StockComparison) -> str:
    """Return in one line how answers compare with those of transformers."""
    same = found.num_prompts - len(found.different)
    shown = ", ".join(map(str, found.different[:8])) + (", ..." if len(found.different) > 8 else "")
    others = f" (others: prompt {shown})" if shown else ""
    return (
        f"transformers in {found.dtype}: the same tokens for {same} of {found.num_prompts} prompts{others}; one after "
        f"another it takes {found.stock_seconds:.2f} s, vivace {found.seconds:.2f} s, "
        f"{found.stock_seconds / max(found.seconds, 1e-9):.2f}x"
    )

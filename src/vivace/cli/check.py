"""``vivace check``: compare plain decoding with the checkpoint, and every method with plain decoding."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Limit, Prompts, questions_of, read_prompts, split_names
from vivace.cli.reference import NUM_SHOWN, compare_plain, complain, plain_json, plain_lines
from vivace.errors import ConfigError
from vivace.methods.table import METHODS


@options.grouped
def check(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Folder, Hub id or GGUF file; left out: the model that ships.")
    ] = None,
    same_model: options.Model = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, with commas; left out: every lossless one that can run here.")
    ] = None,
    prompts: Prompts = "e2e",
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Prompts decoded together by the methods; plain goes alone.", min=1)] = 1,
    load: options.LoadFlags,
    raw: options.Raw = False,
    exact: options.Exact = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare greedy answers: plain decoding's with the checkpoint, those of methods with plain decoding.

    Ends with status 1 if a method differs in a token, or if plain decoding differs by more than rounding explains.
    """
    from vivace.evaluate.sameness import compare

    if model is not None and same_model is not None:
        raise ConfigError(f"the model is given twice, as {model!r} and as --model {same_model!r}; give it once")
    model = same_model if model is None else model
    rows = read_prompts(prompts, limit)
    named = split_names(methods or "")
    engine = open_engine(model, named, load)
    chosen = named or [name for name in engine.methods.ready() if METHODS[name].lossless and name != "plain"]
    questions = questions_of(engine, rows, raw=raw)
    with console.progress("answering") as progress:
        answers, found = compare(
            engine,
            questions,
            chosen,
            max_new_tokens=max_new_tokens,
            batch_size=batch,
            raw=raw,
            exact=exact,
            on_progress=progress,
        )
    what, plain = compare_plain(engine, questions, answers)
    if as_json:
        methods_json = [{**asdict(one), "identical": one.identical} for one in found]
        console.json({"plain": plain_json(what, plain), "methods": methods_json})
    for line in [] if as_json else plain_lines(what, plain):
        console.result(line)
    for one in [] if as_json else found:
        same = one.num_prompts - len(one.differences)
        verdict = "yes" if one.identical else "no"
        console.result(f"{one.method}: identical: {verdict} ({same} of {one.num_prompts} answers)")
        for difference in one.differences[:NUM_SHOWN]:
            gap = "one answer had ended" if difference.gap is None else f"logits {difference.gap:.4g} apart"
            console.result(f"  prompt {difference.prompt + 1}, token {difference.position + 1}: {gap}")
        if len(one.differences) > NUM_SHOWN:
            console.result(f"  and {len(one.differences) - NUM_SHOWN} more")
    if complain(plain) or not all(one.identical for one in found):
        raise typer.Exit(1)

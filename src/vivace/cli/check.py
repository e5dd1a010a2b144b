"""``vivace check``: does every method write what plain decoding writes, token for token?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.asking import Limit, Prompts, questions_of, read_prompts, split_names
from vivace.cli.console import console
from vivace.cli.opening import ModelChoice, open_engine
from vivace.errors import ConfigError
from vivace.recipe import METHODS

NUM_SHOWN = 5


def check(
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id; left out: the model that ships.")] = None,
    same_model: options.Model = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, with commas; left out: every lossless one that can run here.")
    ] = None,
    prompts: Prompts = "e2e",
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Prompts decoded together by the methods; plain goes alone.", min=1)] = 1,
    adapter: options.Adapter = None,
    draft_model: options.DraftModel = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: options.Kernels = "auto",
    weights: options.Weights = "bf16",
    raw: options.Raw = False,
    exact: options.Exact = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare the greedy answers of methods with plain decoding; ends with status 1 if a token differs."""
    from vivace.evaluate.sameness import compare

    if model is not None and same_model is not None:
        raise ConfigError(f"the model is given twice, as {model!r} and as --model {same_model!r}; give it once")
    model = same_model if model is None else model
    rows = read_prompts(prompts, limit)
    named = split_names(methods or "")
    engine = open_engine(ModelChoice(model, adapter, draft_model, device, dtype, kernels, weights), named)
    chosen = named or [name for name in engine.methods.ready() if METHODS[name].lossless and name != "plain"]
    with console.progress("answering") as progress:
        found = compare(
            engine,
            questions_of(engine, rows, raw=raw),
            chosen,
            max_new_tokens=max_new_tokens,
            batch_size=batch,
            raw=raw,
            exact=exact,
            on_progress=progress,
        )
    if as_json:
        console.json({"methods": [{**asdict(one), "identical": one.identical} for one in found]})
    for one in [] if as_json else found:
        same = one.num_prompts - len(one.differences)
        verdict = "yes" if one.identical else "no"
        console.result(f"{one.method}: identical: {verdict} ({same} of {one.num_prompts} answers)")
        for difference in one.differences[:NUM_SHOWN]:
            gap = "one answer had ended" if difference.gap is None else f"logits {difference.gap:.4g} apart"
            console.result(f"  prompt {difference.prompt + 1}, token {difference.position + 1}: {gap}")
        if len(one.differences) > NUM_SHOWN:
            console.result(f"  and {len(one.differences) - NUM_SHOWN} more")
    if not all(one.identical for one in found):
        raise typer.Exit(1)

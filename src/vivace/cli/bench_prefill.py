"""``vivace bench prefill``: how long the first token takes, by length of the prompt and way of reading it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.bench import app as app
from vivace.cli.bench import write_report
from vivace.cli.console import console
from vivace.cli.first_token import measure_first_tokens
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Prompts, read_prompts, split_names, split_numbers
from vivace.prefill.table import PREFILLS


@app.command("prefill")
@options.grouped
def prefill(
    *,
    model: options.Model = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas.")] = "256,512",
    prefills: Annotated[
        str, typer.Option(help=f"Ways to read them, with commas, full among them: {', '.join(PREFILLS)}.")
    ] = "full,lazy",
    keep: options.Keep = None,
    prompts: Prompts = "e2e",
    new_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer; the time of the whole answer is reported too.", min=2)
    ] = 2,
    repeats: Annotated[int, typer.Option(help="Times every prompt is read in every way.", min=1)] = 3,
    load: options.LoadFlags,
    ranks: options.ParallelFlags,
    json_file: options.ReportFile = None,
) -> None:
    """Measure the time to the first token and of the answer: ways of reading take turns, medians are reported."""
    sizes = split_numbers(lengths, "--lengths")
    names = split_names(prefills)
    texts = [str(row.request) for row in read_prompts(prompts, None)]
    engine = open_engine(model, ["plain"], load, ranks=ranks)
    from vivace.checkpoint.files import named_file
    from vivace.evaluate.provenance import provenance

    found, others = measure_first_tokens(engine, texts, sizes, names, keep, repeats, new_tokens=new_tokens)
    report = {
        "provenance": asdict(provenance(engine.model.device)),
        "setting": {
            "model": Path(named_file(engine.folder)).name,
            "kernels": engine.kernels.name,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "keep": keep,
            "new_tokens": new_tokens,
            "repeats": repeats,
            "others_cpu_share": others,
        },
        "rows": [asdict(row) for row in found],
    }
    write_report(report, json_file)
    if str(json_file) == "-":
        return
    columns = ["prompt", "prefill", "first token", "predicted", "speed-up", "layer passes", "predicted"]
    columns += ["whole answer", "speed-up", "tokens/s behind it"]
    rows = [
        [
            str(row.num_tokens),
            row.prefill,
            f"{row.first_token_s * 1e3:.1f} ms",
            f"{row.predicted_s * 1e3:.1f} ms",
            f"{row.speedup:.2f}x",
            f"{row.measured_share:.1%}",
            f"{row.predicted_share:.1%}",
            f"{row.answer_s * 1e3:.1f} ms",
            f"{row.answer_speedup:.2f}x",
            f"{row.decode_tokens_per_s:.1f}",
        ]
        for row in found
    ]
    console.table("", columns, rows)
    console.note("layer passes are those of the prompt, as a share of a full reading's; all but full is lossy")

"""``vivace bench beams``: beam search beside transformers and CTranslate2, on the same weights, ids and threads."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.bench import write_report
from vivace.cli.bench_parallel import app as app
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Prompts, read_prompts, split_names, split_numbers
from vivace.errors import ConfigError
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.engine import Engine


@app.command("beams")
@options.grouped
def beams(
    *,
    model: options.Model = None,
    prompts: Prompts = "e2e",
    limit: Annotated[int, typer.Option(help="Prompts, from the beginning of the file.", min=1)] = 16,
    longest_prompt: Annotated[
        int | None, typer.Option(help="Tokens after which a prompt is cut; left out: none is.", min=1)
    ] = None,
    batches: Annotated[str, typer.Option(help="Prompts that are answered together, with commas.")] = "1,8",
    num_beams: Annotated[int, typer.Option(help="Beams.", min=1, max=64)] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 40,
    min_new_tokens: Annotated[int, typer.Option(help="Shortest answer.", min=0)] = 0,
    length_penalty: Annotated[float, typer.Option(help="Exponent of the length in scores.")] = 1.0,
    no_repeat_ngram_size: Annotated[int, typer.Option(help="No n-gram twice; 0: no such rule.", min=0)] = 0,
    peers: Annotated[
        str,
        typer.Option(
            help="Who else runs: el (vivace with --attention el), transformers, ctranslate2, ctranslate2-int8, with "
            "commas; none: nobody."
        ),
    ] = "transformers",
    repeats: Annotated[int, typer.Option(help="Rounds; systems take turns.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Threads of every system.", min=1)] = 1,
    load: options.LoadFlags,
    json_file: options.ReportFile = None,
) -> None:
    """Measure beam search. Speeds are of the median round, encoders and prompts included, tokenizers not."""
    sizes = split_numbers(batches, "--batches")
    names = [] if peers == "none" else split_names(peers)
    from vivace.evaluate.beams import EL, OURS, check_peers, measure_beams, shares_of
    from vivace.evaluate.ctranslate2 import Search
    from vivace.evaluate.provenance import provenance

    check_peers(names)
    if EL in names and load.attention == EL:
        raise ConfigError("--attention el is what --peers el would be beside; leave one of them out")
    engine = open_engine(model, ["plain"], load, reads_sources=True)
    engines: dict[str, Engine] = {OURS: engine}
    if EL in names:
        engines[EL] = open_engine(model, ["plain"], replace(load, attention=EL), reads_sources=True)
    texts = [row.request for row in read_prompts(prompts, limit)]
    ids = [engine.tokenizer.encode_prompt(text)[:longest_prompt] for text in texts]
    search = Search(num_beams, max_new_tokens, min_new_tokens, length_penalty, no_repeat_ngram_size)
    found = {
        size: measure_beams(engines, ids, search, names, batch_size=size, repeats=repeats, num_threads=threads)
        for size in sizes
    }
    report = {
        "provenance": asdict(provenance(engine.model.device)),
        "setting": {
            "model": engine.folder.name,
            "kernels": engine.kernels.name,
            "weights": engine.weights,
            "attention": engine.sources.name,
            "num_prompts": len(ids),
            "mean_prompt_tokens": sum(map(len, ids)) / len(ids),
            "threads": threads,
            "repeats": repeats,
            **search._asdict(),
        },
        "batches": {
            str(size): [{**asdict(row), **row.figures(len(ids))} for row in rows] for size, rows in found.items()
        },
    }
    write_report(report, json_file)
    if str(json_file) == "-":
        return
    columns = [
        "batch",
        "system",
        "dtype",
        "inputs/s",
        "tokens/s",
        "ms a step",
        "vivace is",
        "other texts",
        "cross cache",
        "peak",
        "encode/decode/select/text",
    ]
    lines = []
    for size, rows in found.items():
        ours = rows[0].figures(len(ids))["inputs_per_s"]
        for row in rows:
            figures = row.figures(len(ids))
            speeds = [f"{figures[name]:.2f}" for name in ("inputs_per_s", "tokens_per_s", "ms_per_step")]
            taken = [format_bytes(count) if count else "" for count in (row.cross_cache_bytes, row.peak_bytes)]
            ratio = f"{ours / figures['inputs_per_s']:.2f}x"
            other = f"{row.num_different}/{len(ids)}"
            lines.append([str(size), row.system, row.dtype, *speeds, ratio, other, *taken, shares_of(row.parts_s)])
    console.table(f"{num_beams} beams, at most {max_new_tokens} tokens, {threads} threads", columns, lines)

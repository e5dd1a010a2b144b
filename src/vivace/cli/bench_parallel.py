"""``vivace bench parallel``: every way to share a model among ranks, in turns, under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vivace
from vivace.cli import options
from vivace.cli.bench import write_report
from vivace.cli.bench_palette import app as app
from vivace.cli.console import console
from vivace.cli.first_token import SPACE, prompt_of
from vivace.cli.prompting import Prompts, read_prompts, split_names, split_numbers
from vivace.errors import ConfigError

if TYPE_CHECKING:
    from vivace.core.config import ModelConfig
    from vivace.engine import Engine
    from vivace.evaluate.ways import WayTime
    from vivace.parallel.every import EveryLoading


WARMING = 512
"""Tokens of a prompt that all ways read before anything is timed."""
DECODED_AFTER = 16
"""Tokens of the prompt of decoding, at most."""


@app.command("parallel")
def parallel(
    *,
    model: options.Model = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas; 4k is 4096.")] = "512,2k",
    ways: Annotated[
        str,
        typer.Option(
            help="With commas: one, auto, tensor, tensor:FORM, runahead-tensor, sequence, sequence-causal, pipeline, "
            "pipeline-gathered, runahead-even, runahead-model, runahead (searched)."
        ),
    ] = "one,tensor,sequence,sequence-causal,pipeline,runahead-even,runahead",
    batches: Annotated[str, typer.Option(help="Sizes of batches for decoding, with commas; 0: none.")] = "1",
    new_tokens: Annotated[int, typer.Option(help="Tokens that are decoded.", min=1)] = 16,
    search: Annotated[int, typer.Option(help="Most partitions that a search times.", min=1)] = 6,
    repeats: Annotated[int, typer.Option(help="Times every prompt is read in every way.", min=1)] = 3,
    prompts: Prompts = "e2e",
    kernels: options.Kernels = "auto",
    dtype: options.Dtype = "auto",
    recovery: options.Recovery = True,
    link_interface: options.LinkInterface = None,
    timeout: options.Timeout = None,
    json_file: options.ReportFile = None,
) -> None:
    """Measure first tokens and decoding of all ways, in turns, and medians over the repeats."""
    from vivace.evaluate.others import watched_others
    from vivace.evaluate.ways import Ways, form_of_sums
    from vivace.parallel import world as worlds
    from vivace.parallel.every import EveryLoading

    names, sizes = split_names(ways), split_numbers(lengths, "--lengths")
    sets = [size for size in split_numbers(batches, "--batches", least=0) if size]
    if not names:
        raise ConfigError(f"--ways names no way in {ways!r}; give one, or leave it out")
    forms = [form for name in names if (form := form_of_sums(name)) is not None] or ["same"]
    world = worlds.join(interface=link_interface, timeout_s=timeout)
    with world.guarding():
        loading = EveryLoading(world, list(dict.fromkeys(forms)))
        how: dict[str, Any] = {"kernels": kernels, "dtype": dtype, "recovery": recovery, "parallel": loading}
        engines = [vivace.load(model, **how) for _ in range(4)]
        whole = engines[0]
        measured = Ways(loading, engines, names, interface=link_interface, searched=search, note=console.note)
        texts = [str(row.request) for row in read_prompts(prompts, None)]
        most = whole.model.config.max_positions - SPACE
        asked = {size: prompt_of(whole, texts, size) for size in within(sizes, most)}
        with watched_others() as others:
            warming = prompt_of(whole, texts, min(WARMING, most))
            Ways(loading, engines, names, searched=1).first_tokens({len(warming): warming}, 1)
            rows = []
            for size, prompt in asked.items():
                rows += measured.first_tokens({size: prompt}, repeats)
                if json_file is not None and str(json_file) != "-":  # a long run that is cut off keeps what it has
                    write_report(report_of(loading, whole, rows, repeats, None), json_file)
            if sets:
                rows += measured.decoding(min(asked.values(), key=len)[:DECODED_AFTER], sets, new_tokens, repeats)
    write_report(report_of(loading, whole, rows, repeats, others.cpu_share), json_file)
    if str(json_file) != "-":
        print_ways(rows)


def report_of(
    loading: EveryLoading, whole: Engine, rows: list[WayTime], repeats: int, others: float | None
) -> dict[str, Any]:
    """Return results as they are written to JSON."""
    from vivace.evaluate.provenance import provenance
    from vivace.evaluate.ways import world_facts

    costs, alone = loading.reading.costs, loading.reading.alone
    return {
        "provenance": asdict(provenance(whole.model.device)),
        "setting": {
            "model": whole.folder.name,
            "kernels": whole.kernels.name,
            "dtype": str(whole.model.dtype).removeprefix("torch."),
            "repeats": repeats,
            "beside_rank_0_cpu_share": others,  # the other ranks of this machine among them
            **world_facts(whole),
            "row_bytes": whole.model.config.width * whole.model.dtype.itemsize,
            "costs": None if costs is None else asdict(costs),
            "alone": None if alone is None else asdict(alone),
            "works": works_of(whole.model.config),
        },
        "rows": [asdict(row) for row in rows],
    }


def works_of(config: ModelConfig) -> dict[str, list[dict[str, float]]]:
    """Return which parts of a layer the ranks have where heads are divided, by the numbers of ranks that can do so."""
    from vivace.errors import ConfigError
    from vivace.parallel.prediction import share_work

    found = {}
    for num_ranks in (2, 4, 8):
        with suppress(ConfigError):
            found[str(num_ranks)] = [asdict(work) for work in share_work(config, num_ranks)]
    return found


def within(sizes: Sequence[int], most: int) -> list[int]:
    """Return lengths in order, none of them twice; those above ``most`` are ``most``, and the user is told."""
    if long := [str(size) for size in sizes if size > most]:
        console.note(f"{', '.join(long)}: longer than the context leaves room for; {most} tokens in their place")
    return list(dict.fromkeys(min(size, most) for size in sizes))


def print_ways(rows: list[WayTime]) -> None:
    """Print one row for each way and length."""
    table = [
        [
            *(row.what, str(row.num_tokens), str(row.batch), row.way),
            f"{row.median_s:.3f} s" if row.what == "first token" else f"{1000 * row.median_s:.1f} ms a step",
            "-" if row.predicted_s is None else f"{row.predicted_s:.3f} s",
            "-" if row.counts is None else " ".join(map(str, row.counts)),
            f"{row.sent_bytes / 1e6:.2f} MB",
        ]
        for row in rows
    ]
    console.table("", ["what", "tokens", "batch", "way", "time", "predicted", "pieces", "rank 0 sent"], table)

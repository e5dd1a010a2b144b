"""``vivace bench palette``: memory and seconds of clustering a matrix while it is trained, by mode."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.bench import write_report
from vivace.cli.bench_prefill import app as app
from vivace.cli.console import console
from vivace.cli.prompting import split_names
from vivace.errors import ConfigError, nearest
from vivace.units import format_bytes


@app.command("palette")
def palette(
    *,
    shape: Annotated[str, typer.Option(help="Outputs x inputs of the matrix.")] = "4096x4096",
    bits: Annotated[int, typer.Option(help="Bits of a code.", min=2, max=4)] = 3,
    rounds: Annotated[int, typer.Option(help="Updates of the centroids in a pass.", min=0)] = 3,
    modes: Annotated[
        str, typer.Option(help="own (backward pass of its own), hooks (plain autograd that keeps little), plain.")
    ] = "plain,hooks,own",
    threads: Annotated[int, typer.Option(help="Threads of each process.", min=1)] = 1,
    json_file: options.ReportFile = None,
) -> None:
    """Measure clustering with one palette for the matrix and with one for each sixteen outputs, a process each.

    Plain autograd keeps some hundred bytes for each weight: gigabytes at 4096x4096. --modes leaves it out.
    """
    from vivace.evaluate.clustering import clustering_cost
    from vivace.evaluate.provenance import provenance
    from vivace.palette.clustering import MODES

    size = _shape(shape)
    if not (names := split_names(modes)):
        raise ConfigError(f"--modes names none; {', '.join(MODES)} are there")
    for name in names:
        if name not in MODES:
            raise ConfigError(f"--modes names {name!r}{nearest(name, MODES)}")
    found = []
    for rows in (None, 16):
        for name in names:
            mode = next(each for each in MODES if each == name)
            found.append(clustering_cost(size, bits, rows, rounds, mode, threads=threads))
            console.note(f"{name}, {'one palette' if rows is None else 'sixteen-row tiles'}: done")
    import torch

    setting = {"shape": list(size), "bits": bits, "rounds": rounds, "threads": threads}
    report = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "setting": setting,
        "costs": [asdict(cost) for cost in found],
    }
    write_report(report, json_file)
    if str(json_file) == "-":
        return
    plain = {cost.rows: cost for cost in found if cost.mode == "plain"}
    table = []
    for cost in found:
        base = plain.get(cost.rows)
        kept = "" if base is None else f"{base.kept_bytes / max(1, cost.kept_bytes):.1f}x"
        peak = "" if base is None else f"{base.peak_bytes / max(1, cost.peak_bytes):.1f}x"
        table.append(
            [
                "one" if cost.rows is None else f"{cost.rows} rows",
                cost.mode,
                format_bytes(cost.kept_bytes),
                kept,
                format_bytes(cost.peak_bytes),
                peak,
                f"{cost.forward_s:.2f}",
                f"{cost.backward_s:.2f}",
            ]
        )
    columns = ["palette", "mode", "kept", "less", "peak", "less", "forward s", "backward s"]
    console.table(f"{shape}, {bits} bits, {rounds} rounds", columns, table)


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--shape is two numbers such as 4096x4096, found {text!r}")
    if int(parts[0]) % 16:
        raise ConfigError(f"--shape {text}: the first number is a multiple of 16, as palettes belong to 16 outputs")
    return int(parts[0]), int(parts[1])

"""``vivace data``: turn the public files of a task into prompt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console


def data(
    task: Annotated[str, typer.Argument(help="e2e, wikisql or advising.", metavar="TASK")],
    source: Annotated[Path, typer.Argument(help="A public .jsonl[.gz] file, or a folder of them.", metavar="SRC")],
    output: Annotated[Path, typer.Argument(help="A folder, or the .jsonl file to write.", metavar="OUT")],
    split: Annotated[str | None, typer.Option(help="Only this split: train or dev.")] = None,
    complete: Annotated[bool, typer.Option(help="e2e train: only references that express every slot.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Turn the public files of a task into prompt files.

    A train file gets one row for each reference; a dev file one row for each distinct prompt, with all its
    references. The spacing of tokenised text (E2E train) is restored to how people write.
    """
    from vivace.evaluate.tasks import convert

    files = convert(task, source, output, split=split, complete=complete)
    rows = [
        {
            "source": str(file.source),
            "output": str(file.output),
            "num_rows": file.num_rows,
            "num_references": file.num_references,
            "was_detokenised": file.was_detokenised,
        }
        for file in files
    ]
    if as_json:
        console.json({"task": task, "files": rows})
        return
    for file in files:
        spacing = ", spacing restored" if file.was_detokenised else ""
        console.result(f"{file.output}: {file.num_rows} rows, {file.num_references} references{spacing}")

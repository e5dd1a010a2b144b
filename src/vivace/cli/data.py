"""``vivace data``: turn the public files of a task into prompt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.errors import ConfigError, nearest


def data(
    task: Annotated[
        str, typer.Argument(help="e2e, wikisql, advising; or long prompts: multidoc, kv, reading.", metavar="TASK")
    ],
    source: Annotated[Path, typer.Argument(help="A public .jsonl[.gz] file, or a folder of them.", metavar="SRC")],
    output: Annotated[Path, typer.Argument(help="A folder, or the .jsonl file to write.", metavar="OUT")],
    split: Annotated[str | None, typer.Option(help="Only this split: train or dev.")] = None,
    complete: Annotated[bool, typer.Option(help="e2e train: only references that express every slot.")] = False,
    documents: Annotated[
        int | None, typer.Option(help="multidoc, kv: documents or keys of a prompt; left out: 20.")
    ] = None,
    position: Annotated[
        int | None, typer.Option(help="multidoc, kv: place of the one that is asked for, from 1; left out: drawn.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="multidoc, kv: of what is drawn; left out: 0.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn the public files of a task into prompt files.

    A train file gets one row for each reference; a dev file one row for each distinct prompt, with all its
    references. The spacing of tokenised text (E2E train) is restored to how people write. Of files for long prompts
    every fifth row is dev.
    """
    from vivace.evaluate.long_prompts import LONG_TASKS, Layout, convert_long
    from vivace.evaluate.tasks import TASKS, convert

    known = [*TASKS, *LONG_TASKS]
    if task not in known:
        raise ConfigError(f"no task {task!r}{nearest(task, known)}")
    drawn = options.given(documents=documents, position=position, seed=seed)
    if task not in ("multidoc", "kv") and drawn:
        raise ConfigError(f"--{next(iter(drawn))} has no effect on {task}; leave it out, or choose multidoc or kv")
    if task in LONG_TASKS:
        if complete:
            raise ConfigError(f"only e2e has slots that an answer could leave out; leave out --complete for {task}")
        files = convert_long(task, source, output, Layout(**drawn), split)
    else:
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

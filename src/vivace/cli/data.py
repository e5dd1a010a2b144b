"""``vivace data``: turn the public files of a task into prompt files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vivace.evaluate.zeroshot import ConvertedTask


def data(
    task: Annotated[
        str,
        typer.Argument(
            help="e2e, wikisql, advising; chat: alpaca, dolly, gsm8k, dialogsum, mt_bench; assistants: snips, "
            "clinc; long prompts: multidoc, kv, reading; to judge by: zeroshot, wikitext.",
            metavar="TASK",
        ),
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
    every fifth row is dev, of instruction sets in one file every tenth. Of choices, continuations and plain text
    (zeroshot, wikitext) each file becomes a task file.
    """
    from vivace.evaluate.chat_tasks import CHAT_TASKS, convert_chat
    from vivace.evaluate.long_prompts import LONG_TASKS, Layout, convert_long
    from vivace.evaluate.tasks import TASKS, convert
    from vivace.evaluate.zeroshot import JUDGED_TASKS, convert_task

    known = [*TASKS, *CHAT_TASKS, *LONG_TASKS, *JUDGED_TASKS]
    if task not in known:
        raise ConfigError(f"no task {task!r}{nearest(task, known)}")
    drawn = options.given(documents=documents, position=position, seed=seed)
    if task not in ("multidoc", "kv") and drawn:
        raise ConfigError(f"--{next(iter(drawn))} has no effect on {task}; leave it out, or choose multidoc or kv")
    if task in JUDGED_TASKS:
        if split is not None or complete:
            raise ConfigError(
                f"--split and --complete have no effect on {task}, which is only judged by; leave them out"
            )
        _write_tasks(convert_task(task, source, output), task, as_json=as_json)
        return
    if task in (*LONG_TASKS, *CHAT_TASKS) and complete:
        raise ConfigError(f"only e2e has slots that an answer could leave out; leave out --complete for {task}")
    if task in CHAT_TASKS:
        files = convert_chat(task, source, output, split)
    elif task in LONG_TASKS:
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


def _write_tasks(done: Sequence[ConvertedTask], task: str, *, as_json: bool) -> None:
    """Say which task files were written, and which public files have nothing to choose from."""
    if as_json:
        files = [
            {"source": str(each.source), "output": each.output and str(each.output), "num_rows": each.num_rows}
            for each in done
        ]
        console.json({"task": task, "files": files})
        return
    for each in done:
        if each.output is None:
            console.note(f"{each.source}: no options; its questions are answered in words, so it is left out")
        else:
            console.result(f"{each.output}: {each.num_rows} rows")

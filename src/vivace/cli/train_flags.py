"""The flags of ``vivace train``, and what follows from them alone: prompts, folder of the result, who reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.errors import ConfigError, CorruptError
from vivace.prompts import Prompt, load_prompts, load_text

if TYPE_CHECKING:
    from vivace.train.report import Report


TEXT = ".txt"
"""Ending of files of plain text."""


@dataclass(frozen=True)
class TrainFlags:
    """Flags of every kind of training; ``grouped`` makes one flag of each field."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A prompt file with references; palette, recover and lora take plain text (.txt), too; repeatable.",
            metavar="FILE",
        ),
    ] = None
    answers: Annotated[
        Path | None,
        typer.Option(
            help="The model's own answers as another training had them written (OUT/run/own.jsonl); nothing else is "
            "learnt from.",
            metavar="FILE",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder to write (default: MODEL/adapters/METHOD); a killed run there goes on.")
    ] = None
    minutes: Annotated[
        float | None, typer.Option(help="Minutes for everything; without, the recipe's.", metavar="N")
    ] = None
    model: options.Model = None
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA over which a method's weights are trained; without --out they lie in it and are taken with it.",
            metavar="[NAME=]DIR",
        ),
    ] = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    memory: options.Memory = None
    reader: options.Reader = "auto"
    ignore_config_key: options.IgnoreConfigKey = None
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard curves; needs the extra 'train'.", metavar="DIR")
    ] = None
    is_dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the training would need (memory, minutes, files) and write nothing."),
    ] = False
    as_json: options.AsJson = False

    @property
    def reads_store(self) -> bool:
        """Return whether flags say how a store is read."""
        return (self.memory, self.reader) != (None, "auto")

    @property
    def lora(self) -> Path | None:
        """Return the folder of the LoRA over which is trained; None for the model as it is."""
        return None if self.adapter is None else Path(self.adapter.rpartition("=")[2])

    def load_flags(self) -> options.LoadFlags:
        """Return how the model is loaded for a training: by PyTorch's kernels and without its recovery adapter."""
        return options.LoadFlags(
            device=self.device,
            dtype=self.dtype,
            kernels="torch",
            ignore_config_key=self.ignore_config_key,
            recovery=False,
        )

    def prompts(self, *, are_answered: bool = False, takes_text: bool = False) -> list[Prompt]:
        """Read the rows of all prompt files.

        Args:
            are_answered: whether the model answers them before it learns. Of conversations only the question is needed
                then; otherwise they must have turns to learn from.
            takes_text: whether plain text (.txt) is learnt from as well, in pieces.

        Raises:
            NotFoundError: there is no such file.
            ConfigError: a row, or plain text, cannot be learnt from.
            CorruptError: a file is no text.
        """
        from vivace.train.data import check_questions, check_turns, pieces_of

        rows, check = list[Prompt](), check_questions if are_answered else check_turns
        for path in self.data or ():
            if path.suffix != TEXT:
                rows += load_prompts(path, check=check)
            elif takes_text and not are_answered:
                pieces = pieces_of(load_text(path))
                if not pieces:
                    raise CorruptError(f"{path} has no text")
                rows += pieces
            else:
                raise ConfigError(f"{path} is plain text, in which nothing is asked; give prompts (.jsonl)")
        return rows

    def folder(self, kind: str) -> Path:
        """Return where the result goes: ``--out``, or the place where ``--method`` looks for it.

        That is in the model's folder, and for a model of the Hub in its copy on this machine.

        Raises:
            ConfigError: nothing is given, or the model comes with the package.
            NotFoundError: there is no such model.
        """
        if self.out is not None:
            return self.out
        if self.model is None:
            raise ConfigError("say where the result goes: --out DIR")
        from vivace.checkpoint.files import PACKAGED, resolve

        folder = resolve(self.model)
        if folder.is_relative_to(PACKAGED) and not Path(self.model).is_dir():
            raise ConfigError("say where the result goes: --out DIR; a folder in the package is not yours")
        return folder / "adapters" / kind

    def report(self) -> Report:
        """Return what reports progress: notes on stderr, and TensorBoard curves if a folder for them is given."""
        from vivace.train.report import Curves, Lines

        lines = Lines(console.note)
        return lines if self.tensorboard is None else Curves(self.tensorboard, lines)

"""The ``vivace`` command with all its subcommands, and the translation of errors into exit statuses.

Exit status: 0 for success, 1 for a failure, 2 for a request that cannot be fulfilled. An error is one line on stderr;
``--traceback`` shows where it came from. ``--quiet`` and ``--traceback`` may stand anywhere on the line.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import Abort, TyperException

import vivace
from vivace.cli import (
    batch,
    bench_beams,
    chat,
    check,
    compress,
    convert,
    data,
    demo,
    doctor,
    evaluate,
    generate,
    inspect,
    serve,
    train,
    tune,
    upcycle,
    widen,
)
from vivace.cli.console import console
from vivace.errors import VivaceError, WorldError

GLOBAL_FLAGS = ("--quiet", "--traceback")
"""Flags that are accepted at any place of the command line."""


def _print_version(is_wanted: bool) -> None:
    """Print the version and stop, if ``--version`` was given."""
    if is_wanted:
        console.result(f"vivace {vivace.__version__}")
        raise typer.Exit


def build() -> typer.Typer:
    """Return the command line with all its commands."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command("generate")(generate.generate)
    app.command("chat")(chat.chat)
    app.command("batch")(batch.batch)
    app.command("serve")(serve.serve)
    app.add_typer(bench_beams.app, name="bench")
    app.command("check")(check.check)
    app.command("evaluate")(evaluate.evaluate)
    app.command("data")(data.data)
    app.command("train")(train.train)
    app.command("tune")(tune.tune)
    app.command("doctor")(doctor.doctor)
    app.command("inspect")(inspect.inspect)
    app.command("widen")(widen.widen)
    app.command("upcycle")(upcycle.upcycle)
    app.command("convert")(convert.convert)
    app.command("compress")(compress.compress)
    app.command("demo")(demo.demo)
    app.callback()(_root)
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress or notes on stderr (any place).")] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from (any place).")
    ] = False,
) -> None:
    """Make a Hugging Face language model answer faster, with the same answers."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit status.

    Bytes of standard input that are no text become lone surrogates, as they do on the command line, so that a
    conversation goes on behind the line that has them. Characters that an output cannot spell are written as escapes.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):  # None where it is closed
        sys.stdin.reconfigure(errors="surrogateescape")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper) and output.errors == "strict":
            output.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if args is None else args))


RANK_COMMANDS = (["bench", "parallel"], ["tune", "runahead"])
"""Commands that are always started on several ranks."""


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    words, flags = _take_global_flags(args)
    is_shared = any(word.partition("=")[0] == "--parallel" for word in words) or words[:2] in RANK_COMMANDS
    follows = is_shared and os.environ.get("RANK", "0") != "0"
    console.is_quiet = "--quiet" in flags or follows
    try:
        with console.says_what_takes_long():
            return int(build()(args=words, prog_name="vivace", standalone_mode=False) or 0)
    except (Exception, Abort) as error:  # noqa: BLE001 - the last resort: whatever it is, the user gets one line
        if "--traceback" in flags:
            traceback.print_exc()
        if (worlds := sys.modules.get("vivace.parallel.world")) is not None:
            worlds.leave(str(error))
        if follows and not isinstance(error, WorldError):  # rank 0 says the same
            return getattr(error, "exit_code", 1)
        return _report(error)


def _take_global_flags(args: Sequence[str]) -> tuple[list[str], set[str]]:
    """Separate the flags of ``GLOBAL_FLAGS`` from the other words; after ``--`` nothing is a flag."""
    end = list(args).index("--") if "--" in args else len(args)
    flags = {word for word in args[:end] if word in GLOBAL_FLAGS}
    return [word for word in args[:end] if word not in GLOBAL_FLAGS] + list(args[end:]), flags


def _report(error: BaseException) -> int:
    """Print one line for an error and return the exit status."""
    if isinstance(error, VivaceError):
        console.error(str(error))
        return error.exit_code
    if isinstance(error, TyperException):
        console.error(_usage_message(error))
        return error.exit_code
    if isinstance(error, Abort):
        console.error("stopped")
        return 130
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        console.error(f"{where}{error.strerror or error}")
        return 1
    console.error(f"{type(error).__name__}: {error} (not expected; --traceback shows where)")
    return 1


def _usage_message(error: TyperException) -> str:
    """Return what is wrong with the command line, with the nearest flag if there is one."""
    option = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        near = error.possibilities or ()
        hint = f"did you mean {near[0]}?" if near else "--help lists them"
        return f"no option {option}; {hint}"
    return error.format_message()

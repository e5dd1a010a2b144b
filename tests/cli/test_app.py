"""What holds for every command: streams, exit statuses, one-line errors, quick help."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.conftest import FakeEngine, Outcome
from vivace.cli.app import build
from vivace.errors import CapacityError, CorruptError

Cli = Callable[..., Outcome]


def test_help_is_quick_and_loads_no_torch() -> None:
    ours = (
        "import sys; from vivace.cli.app import run; status = run(['--help']);"
        "sys.exit(status or sum(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    least = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"
    times: dict[str, list[float]] = {ours: [], least: []}
    for code in (ours, least) * 7:  # a virtual machine counts a third more now and then
        before = _seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        times[code].append(_seconds_of_children() - before)
        assert done.returncode == 0, done.stderr
        assert ("generate" in done.stdout) == (code == ours)
    assert min(times[ours]) < 2.2 * min(times[least]), "help costs little more than an app that says nothing"


def _seconds_of_children() -> float:
    """Processor time of finished processes: unlike the clock it does not depend on who else is running."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_command_has_help(cli: Cli) -> None:
    names = [command.name for command in build().registered_commands]
    assert {"generate", "chat", "data"} <= set(names)
    for name in names:
        outcome = cli(name, "--help")
        assert outcome.status == 0, name
        assert f"vivace {name}" in outcome.out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("vivace 0.")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["generate", "--temprature", "1", "Hi"], "error: no option --temprature; did you mean --temperature?"),
        (["generate", "--zzz", "Hi"], "error: no option --zzz; --help lists them"),
        (["genrate"], "error: No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--top-k", "many", "Hi"], "error: Invalid value for '--top-k'"),
        (["generate"], "error: expected a prompt (or - for stdin) or --prompt-file, found neither"),
        (["generate", " "], "error: the prompt is empty"),
        (["data", "e2e"], "error: Missing argument"),
        (["data", "e2f", "a", "b"], "error: no task 'e2f'; did you mean 'e2e'?"),
    ],
)
def test_wrong_use_is_one_line_and_status_two(cli: Cli, words: list[str], complaint: str) -> None:
    outcome = cli(*words)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith(complaint)
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            CapacityError("the prompt has 9 tokens,\nthe context holds 8"),
            2,
            "the prompt has 9 tokens, the context holds 8",
        ),
        (CorruptError("model.safetensors: truncated"), 1, "model.safetensors: truncated"),
        (OSError(28, "No space left on device", "out/x"), 1, "out/x: No space left on device"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops (not expected; --traceback shows where)"),
    ],
)
def test_an_error_is_one_line_and_its_status(
    cli: Cli, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, line: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(engine, "stream", fail)
    assert cli("generate", "Hi", "--quiet") == Outcome(status, "", f"error: {line}\n")
    shown = cli("generate", "Hi", "--quiet", "--traceback")
    assert shown.status == status
    assert shown.err.startswith("Traceback")
    assert shown.err.endswith(f"error: {line}\n")


def test_global_flags_stop_at_a_double_dash(cli: Cli, engine: FakeEngine) -> None:
    assert cli("--quiet", "generate", "--", "--quiet").out == "--QUIET\n"
    assert engine.asked[0][0] == "--quiet"


def test_a_closed_pipe_is_not_an_error() -> None:
    code = "from vivace.cli.app import run; import sys; sys.exit(run(['generate', '--help']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""

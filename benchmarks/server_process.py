"""Running ``vivace serve`` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 120.0


@contextmanager
def server_process(
    *words: str, log: Path, stdin: str = "", threads: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server during a block; yield its address and its process.

    Args:
        words: flags of ``vivace serve``; a port among them overrides the free one.
        log: file for what it prints.
        stdin: text for its standard input.
        threads: number of threads that it computes with; None leaves the default.

    Raises:
        RuntimeError: the server did not start; the message has what it printed.
    """
    command = [sys.executable, "-m", "vivace", "serve", "--port", "0", *words]
    environment = dict(os.environ) if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=out, stdout=out, text=True, env=environment)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # one that did not start says so in its log
        process.stdin.write(stdin)
        process.stdin.close()
    try:
        until = time.monotonic() + START_S
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        yield found[1], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()

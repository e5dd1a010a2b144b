"""A program that compiles unknown grammars first, so that the server itself compiles only harmless ones.

llguidance has limits of its own, and yet a schema of a hundred bytes can take ten seconds and 300 MB (``multipleOf:
1000003``), and a long chain of ``$ref`` overflows the stack, which ends the process. So every grammar is compiled in a
fork of this small program, under limits of the operating system. Some answers are then written with it, because some
limits are only reached then. The file imports nothing of vivace, and is run by its path.

It reads a line of JSON (``{"kind": "json" or "lark", "text": ...}``) and writes one: ``problem``, null when the grammar
is good, and ``num_bytes``, the memory that it takes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GIVES_WAY = 5
"""Nice level, so that decoding and answering have priority."""
MAX_SECONDS = 2
"""Processor time that one grammar may take."""
MAX_BYTES = 64 << 20
"""Memory that a compiled grammar may keep."""
MAX_BYTES_MEANWHILE = 256 << 20
"""Memory that compiling may take."""
STACK_BYTES = 1 << 20
"""Stack size, smaller than that of any thread of the server, so that what fits here fits there."""
NUM_ANSWERS = 4
NUM_TOKENS = 64
"""Number of answers that are tried, and of their tokens."""
MAX_WORDS = 1000
"""Largest number of characters kept of the library's message, which may repeat the grammar."""
MAX_STATES = 50_000
"""Largest number of states of a lexer; each takes up to a kilobyte for as long as the grammar is kept."""


def limits() -> LLParserLimits:
    """Return llguidance's own limits, used here and in the server."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)


def compiled(kind: str, text: str, table: LLTokenizer) -> LLMatcher:
    """Return a matcher that has read no token; it may be in an error state.

    Raises:
        ValueError: the text is no grammar of this kind.
    """
    from llguidance import LLMatcher

    make = LLMatcher.grammar_from_json_schema if kind == "json" else LLMatcher.grammar_from_lark
    return LLMatcher(table, make(text), log_level=0, limits=limits())


def stuck(matcher: LLMatcher, mask: bytes) -> str | None:
    """Return why no token of this mask continues the answer; None if one does."""
    if matcher.is_error():
        return matcher.get_error()
    return None if any(mask) else "no token may come next"


def rehearse(matcher: LLMatcher, seed: int) -> str | None:
    """Write a random answer; return why it could not continue, None if it could."""
    draws = random.Random(seed)
    for _ in range(NUM_TOKENS):
        mask = matcher.compute_bitmask()
        if (why := stuck(matcher, mask)) is not None:
            return why
        if matcher.is_stopped() or not matcher.consume_token(draws.choice(_allowed(mask))):
            break
    return matcher.get_error() or None


def _allowed(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def verdict(asked: dict[str, str], table: LLTokenizer) -> dict[str, Any]:
    """Compile and try a grammar in this process, which may not survive it, and return the result."""
    before = _resident()
    try:
        matcher = compiled(asked["kind"], asked["text"], table)
        problem = matcher.get_error() or None
        for seed in range(NUM_ANSWERS if problem is None else 0):
            problem = problem or rehearse(matcher.deep_copy(), seed)
    except ValueError as exc:
        return {"problem": str(exc)[:MAX_WORDS], "num_bytes": 0}
    num_bytes = _resident() - before
    if problem is None and num_bytes > MAX_BYTES:
        problem = f"compiled it takes {num_bytes >> 20} MiB, and there are {MAX_BYTES >> 20}"
    return {"problem": problem and problem[:MAX_WORDS], "num_bytes": num_bytes}


def _resident() -> int:
    """Return the largest number of bytes of memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _limit() -> None:
    """Set the limits of this process; limits that the system does not have are skipped."""
    with suppress(OSError, ValueError):
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - this process ends soon
        room = pages * resource.getpagesize() + MAX_BYTES_MEANWHILE
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    for kind, most in (
        (resource.RLIMIT_CPU, MAX_SECONDS),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _ended(status: int) -> str:
    """Return why a process ended that wrote no result."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = {
            signal.SIGXCPU: f"it takes more than {MAX_SECONDS} seconds to compile",
            signal.SIGSEGV: "it is nested too deeply",
            signal.SIGBUS: "it is nested too deeply",
            signal.SIGABRT: f"it takes more than {MAX_BYTES_MEANWHILE >> 20} MiB to compile",
        }
        return known.get(signal.Signals(number), f"compiling it ended with signal {number}")
    return "it cannot be compiled"


def try_out(asked: dict[str, str], table: LLTokenizer) -> dict[str, Any]:
    """Return the result of a fork that compiles and tries a grammar."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reads)
            _limit()
            os.write(writes, json.dumps(verdict(asked, table)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(said) if said else {"problem": _ended(status), "num_bytes": 0}
    return found


def main() -> None:
    """Answer lines until the input ends."""
    from llguidance import LLTokenizer

    os.nice(GIVES_WAY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics writes where it stood
    table = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(try_out(json.loads(line), table)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Compiles the grammars of answers, each once: first on trial in another process, then kept while it is in use.

Compiling releases Python's lock (according to llguidance, and measured by ``tests/serve/test_bombs.py``). So a thread
that waits in these functions delays no other; they must not be called on the event loop's own thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import DependencyError
from vivace.serve import grammar_trial
from vivace.serve.api_error import APIError
from vivace.serve.grammar_trial import MAX_SECONDS, compiled, stuck
from vivace.serve.tool_format import LAYOUT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 256 << 10
"""Largest text of a grammar."""
MAX_KEPT = 16
"""Number of compiled grammars kept for further requests."""
MAX_KEPT_BYTES = 256 << 20
"""Memory of those, as measured by their trials."""
MAX_COPIES = 1024
"""Number of answers after which a grammar is compiled anew: its copies share a lexer, which never drops a state."""
MAX_WAIT_S = 15 * MAX_SECONDS
"""Longest wait for a trial, on a machine that has other work."""


@dataclass
class Grammar:
    """A compiled grammar, from which every answer gets a matcher of its own."""

    matcher: LLMatcher
    """A matcher that has read no token; answers get copies of it."""
    num_bytes: int
    num_copies: int = 0
    is_spoilt: bool = False
    """Return whether the lexer that all copies share has reached a limit, so that no further answer may use it."""

    @property
    def is_fresh(self) -> bool:
        """Return whether a further answer may use it."""
        return not self.is_spoilt and self.num_copies < MAX_COPIES

    def copy(self) -> LLMatcher:
        """Return a matcher for one answer, at its beginning."""
        self.num_copies += 1
        return self.matcher.deep_copy()


class Trials:
    """The process that compiles unknown grammars first; it starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, kind: str, text: str) -> int:
        """Try a grammar, one at a time, and return the bytes of memory that it takes.

        Raises:
            ValueError: it cannot be used, for the reason in the message.
            APIError: the trial did not end in time (503).
        """
        with self._lock:
            said = self._ask(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
        if not said:
            raise APIError(503, "this schema could not be tried out in time; try again later", code="busy")
        found = json.loads(said)
        if found["problem"] is not None:
            raise ValueError(found["problem"])
        return int(found["num_bytes"])

    def close(self) -> None:
        """End the process in which schemas are tried."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its fork, which may be at work
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _ask(self, line: bytes) -> bytes:
        """Return the line that answers; empty if none comes, and the next grammar is then tried in a new process."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, str(Path(grammar_trial.__file__))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        with suppress(OSError):
            pipes.stdin.write(line)
            pipes.stdin.flush()
            if select.select([pipes.stdout], [], [], MAX_WAIT_S)[0] and (said := pipes.stdout.readline()):
                return said
        self.close()
        return b""


class Grammars:
    """Compiles grammars and keeps them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compile nothing yet.

        Args:
            tokenizer: of the model.
            vocab_size: of the model, which may be larger than the tokenizer's.
        """
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._table: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[bytes, str, str], Grammar] = OrderedDict()
        self._straddling: dict[bytes, list[tuple[int, int, bytes]]] = {}
        self._trials = Trials()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the process in which schemas are tried."""
        self._trials.close()

    def json_schema(self, schema: Mapping[str, Any], owner: bytes) -> Grammar:
        """JSON of a schema.

        Args:
            schema: the JSON schema.
            owner: whose request it is; compiled grammars are not shared between owners.

        Raises:
            APIError: the schema is wrong or says something that cannot be kept to.
            DependencyError: llguidance is missing.
        """
        spelt = json.dumps({**schema, "x-guidance": LAYOUT})
        return self._find(owner, "json", spelt, spelt, "response_format")

    def calls(self, lark: str, owner: bytes, *, trial: str | None = None) -> Grammar:
        """Calls of tools, as a Lark grammar says.

        Args:
            lark: see ``tool_format``.
            owner: whose request it is.
            trial: the same without the numbers of special tokens, which only this vocabulary has.

        Raises:
            APIError: the schema of a function's arguments is wrong or cannot be kept to.
            DependencyError: llguidance is missing.
        """
        return self._find(owner, "lark", lark, lark if trial is None else trial, "tools")

    def table(self) -> LLTokenizer:
        """Return the vocabulary as llguidance represents it.

        Raises:
            APIError: it does not work with this tokenizer.
            DependencyError: llguidance is missing.
        """
        with self._lock:
            if self._table is None:
                self._table = self._read_vocabulary()
            return self._table

    def straddling(self, tag: bytes) -> list[tuple[int, int, bytes]]:
        """Return the tokens that end a tag and hold more: (bytes of the tag before it, token, its bytes after the tag).

        Raises:
            APIError: see ``table``.
            DependencyError: llguidance is missing.
        """
        table = self.table()
        with self._lock:
            found = self._straddling.get(tag)
            if found is None:
                found = self._straddling[tag] = list(_straddling(table, tag))
            return found

    def _read_vocabulary(self) -> LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as exc:
            raise DependencyError("response_format and tools need llguidance; install vivace[serve]") from exc
        if self._tokenizer.is_missing:
            raise APIError(400, "answers of this model cannot be bound: the checkpoint has no tokenizer")
        ends = list(self._tokenizer.eos_ids)
        if not ends:
            raise APIError(400, "answers of this model cannot be bound: its tokenizer has no token that ends a text")
        try:
            return from_tokenizer(self._tokenizer.inner, n_vocab=self.vocab_size, eos_token=ends)
        except ValueError as exc:
            raise APIError(400, f"answers of this model cannot be bound: {_line(str(exc))}") from exc

    def _find(self, owner: bytes, kind: str, text: str, trial: str, param: str) -> Grammar:
        key = (owner, kind, text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found.is_fresh:
                self._kept.move_to_end(key)
                return found
        made = self._compile(kind, text, trial, param)
        with self._lock:
            self._kept[key] = made
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT or sum(one.num_bytes for one in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return made

    def _compile(self, kind: str, text: str, trial: str, param: str) -> Grammar:
        table = self.table()
        try:
            if len(text) > MAX_SCHEMA_BYTES:
                raise ValueError(f"it has {len(text)} characters, and this server takes {MAX_SCHEMA_BYTES}")
            num_bytes = self._trials(kind, trial)
            matcher = compiled(kind, text, table)
            # the process knew bytes only; on this vocabulary the first step may still be too much
            first = matcher.deep_copy()
            problem = matcher.get_error() or stuck(first, first.compute_bitmask())
            if problem:
                raise ValueError(problem)
        except ValueError as exc:
            raise APIError(400, f"{param}: this schema cannot be used: {_line(str(exc))}", param=param) from exc
        return Grammar(matcher, num_bytes + len(text))


def _straddling(table: LLTokenizer, tag: bytes) -> Iterator[tuple[int, int, bytes]]:
    for token in range(table.vocab_size):
        text = table.decode_bytes([token])
        for written in range(len(tag) if tag[-1:] in text else 0):
            before, found, rest = (tag[:written] + text).partition(tag)
            # a whole tag inside the token is found when nothing was written before it
            if found and rest and not (written and before):
                yield written, token, rest


def _line(text: str) -> str:
    """Return the library's message as one line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]

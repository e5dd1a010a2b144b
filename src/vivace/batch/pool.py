"""Processes that tokenize prompts and turn answers back into text while the main process decodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vivace.adapters.guard.untrusted import encoded
from vivace.checkpoint.tokenizer import Tokenizer, find_tokenizer
from vivace.errors import DecodingError, VivaceError

_OWN: list[Tokenizer] = []
"""The tokenizer of a process, once it has begun."""


class TokenizerPool:
    """Turns prompts into tokens and tokens into texts, in processes of its own or, without any, at once."""

    def __init__(self, folder: Path, num_workers: int, *, raw: bool, stops: Sequence[str]) -> None:
        """Start the processes; each opens the tokenizer for itself.

        Args:
            folder: of the checkpoint.
            num_workers: number of processes; 0 works in this one.
            raw: whether prompts are taken without the chat template.
            stops: texts before which an answer ends.
        """
        self._raw, self._stops = raw, tuple(stops)
        self._pool: Executor | None = None
        if num_workers:
            self._pool = ProcessPoolExecutor(
                num_workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(str(folder),)
            )
        else:
            _begin(str(folder))

    def tokens(self, prompts: Sequence[Any]) -> Future[list[list[int] | str]]:
        """Return the token ids of prompts, or what is wrong with one, as soon as they are there."""
        return self._submit(_tokens, list(prompts), self._raw)

    def texts(self, answers: Sequence[Sequence[int]]) -> Future[list[str]]:
        """Return the texts of answers, as soon as they are there."""
        return self._submit(_texts, [list(answer) for answer in answers], self._stops)

    def _submit(self, work: Any, *values: Any) -> Future[Any]:
        if self._pool is not None:
            try:
                return self._pool.submit(work, *values)
            except BrokenProcessPool as error:
                raise _died() from error
        done: Future[Any] = Future()
        done.set_result(work(*values))
        return done

    def close(self) -> None:
        """End the processes without waiting for what they do."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def wait(future: Future[Any]) -> Any:
    """Return the result of a piece of work.

    Raises:
        DecodingError: the process that did it has ended.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _died() from error


def _died() -> DecodingError:
    return DecodingError(
        "a process that tokenizes was killed; what is answered is kept, and the same command goes on from there"
    )


def _begin(folder: str) -> None:
    _OWN[:] = [find_tokenizer(folder)]


def _tokens(prompts: list[Any], raw: bool) -> list[list[int] | str]:
    found: list[list[int] | str] = []
    for prompt in prompts:
        try:
            found.append(encoded(prompt, _OWN[0], raw=raw))
        except VivaceError as error:
            found.append(str(error))
    return found


def _texts(answers: list[list[int]], stops: tuple[str, ...]) -> list[str]:
    texts = [_OWN[0].decode(answer) for answer in answers]
    return [text[: min([len(text), *(at for stop in stops if (at := text.find(stop)) >= 0)])] for text in texts]

"""One run over a file of prompts: windows of prompts are tokenized, sorted by length, and decoded in batches.

While a batch is decoded, the processes tokenize the next window and turn the tokens of the last batches into text. What
waits between them is bounded: one window of prompts, and a few batches of answers.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from vivace.batch.journal import Journal, digest
from vivace.batch.pool import TokenizerPool, wait
from vivace.checkpoint.adapters import CONFIG, TENSORS, base_hash
from vivace.checkpoint.save import TEXT_FILES
from vivace.decode.request import Emitted, Request
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, CorruptError, NotFoundError, UnsupportedError, UsageError
from vivace.files import UNREADABLE, replacing, unpacked
from vivace.methods.table import find_method
from vivace.prompts import load_prompts
from vivace.storage.neurons.predictors import FILE as PREDICTORS
from vivace.storage.neurons.thresholds import FILE as THRESHOLDS

WINDOW = 2048
"""Prompts that are sorted together."""
SETTINGS = (
    *("max_new_tokens", "max_tokens", "min_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "length_penalty"),
    *("early_stopping", "forced_bos_token_id", "stop_strings", "stop", "ignore_eos", "seed", "logprobs"),
    *("adapter", "method", "num_draft_tokens", "soft_prompt", "prefill", "decode_keep", "min_prompt"),
)
"""Settings that hold for all prompts of a file, by the names that a row might give them."""
_PIECE = 64
"""Prompts that a process gets at a time."""
_MOST_WAITING = 4
"""Batches of answers that may wait to become text."""


@dataclass(frozen=True)
class Summary:
    """What a run has done."""

    num_prompts: int
    num_answered_before: int
    """Answers that an earlier run had left in the journal."""
    num_tokens: int
    seconds: float


class _Asked(NamedTuple):
    line: int
    prompt: Any
    request: Request


def read_prompts(path: Path) -> list[Any]:
    """Return the prompts of a file: one for each line of a text, or the rows of a ``.jsonl`` file; ``.gz`` may follow.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is not UTF-8 text, or damaged.
        ConfigError: a line is empty, there is none, or a row has settings of its own.
    """
    if path.is_dir():
        raise NotFoundError(f"{path} is a folder; name a file of prompts")
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    if _is_jsonl(path):
        return [row.request for row in load_prompts(path, settings=SETTINGS)]
    try:
        text = unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.object[: error.start].count(b"\n") + 1
        raise CorruptError(f"{path}, line {place}: not UTF-8 text ({error.reason})") from error
    except UNREADABLE as error:
        raise CorruptError(f"{path}: not readable as packed text ({error})") from error
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ConfigError(f"{path}, line {number}: the prompt is empty; every line is one prompt")
    return [line.removesuffix("\r") for line in lines]


def answer_file(
    engine: Engine,
    source: Path,
    output: Path,
    options: Options,
    *,
    num_workers: int = 2,
    batch_tokens: int = 16384,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Answer all prompts of a file, or those that an earlier run has not answered.

    Args:
        engine: the model.
        source: prompts, see ``read_prompts``.
        output: one line for each prompt, in their order: the text, or an object where its name ends in ``.jsonl``;
            packed where ``.gz`` follows.
        options: how to decode; ``batch_size`` has no effect.
        num_workers: processes that tokenize; 0 does without.
        batch_tokens: tokens of prompts and answers that are decoded together at most, counted as if all were as long
            as the longest, and for each beam.
        settings: what the answers depend on, for the journal.
        progress: called with the number of answers and of prompts.

    Raises:
        ConfigError: the output is a folder or the source, or has no place for further texts of a search.
        UsageError: a prompt is empty or too long; the message names its line, and what is answered is kept.
        DecodingError: a process was killed; what is answered is kept.
    """
    if engine.tokenizer.is_missing:
        raise UnsupportedError("this checkpoint has no tokenizer, so lines of text cannot be read; use generate")
    if batch_tokens < 1 or num_workers < 0:
        raise ConfigError(
            f"batch_tokens must be at least 1 and workers at least 0, found {batch_tokens}, {num_workers}"
        )
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; name a file for the answers")
    if source.resolve() == output.resolve():
        raise ConfigError(f"{output} would replace the prompts; name another file for the answers")
    beams = options.beams(engine.defaults)
    if beams is not None and beams.num_return_sequences > 1 and not _is_jsonl(output):
        raise ConfigError(
            f"num_return_sequences {beams.num_return_sequences} has no place in {output}, which has a line for each "
            "prompt; name a .jsonl file for the answers, or ask for 1"
        )
    started = time.perf_counter()
    prompts = read_prompts(source)
    journal = Journal(output, {**_known_of(engine, options.method), **(settings or {})})
    left = [(line, prompt) for line, prompt in enumerate(prompts, 1) if journal.answer(line, prompt) is None]
    run = _BatchRun(engine, options, journal, batch_tokens)
    texts = TokenizerPool(
        engine.folder, num_workers if left else 0, raw=options.raw, stops=engine.stop_strings(options)
    )
    done, is_written = len(prompts) - len(left), False
    try:
        for count in run.answered(left, texts):
            done += count
            progress(done, len(prompts))
        _write(output, journal.answers(prompts))
        is_written = True
    finally:
        texts.close()
        journal.close(delete=is_written)
    return Summary(len(prompts), len(prompts) - len(left), run.num_tokens, time.perf_counter() - started)


def _known_of(engine: Engine, method: str) -> dict[str, Any]:
    """Return what answers depend on besides the caller's settings: weights, those of each LoRA that may be worn, soft
    prompts, what a lossy method has learnt, generation settings, and the files by which text becomes tokens.
    """
    loras = [engine.adapters.find(name).version for name in engine.adapters.names]
    pool = () if engine.prompt_pool is None else engine.prompt_pool.members.values()
    spec = find_method(method)
    learnt = None if spec.lossless else engine.methods.adapter_folder(spec.adapter or spec.name)
    return {
        "model": str(engine.folder),
        "weights": [base_hash(engine.folder), *loras, *(member.version for member in pool)],
        "method": _digests(learnt, (CONFIG, TENSORS)),
        "defaults": digest({name: str(value) for name, value in sorted(engine.defaults.items())}),
        "texts": _digests(engine.folder, (*TEXT_FILES, THRESHOLDS, PREDICTORS)),
    }


def _digests(folder: Path | None, names: Sequence[str]) -> dict[str, str]:
    """Return the digests of those of some files of a folder that are there."""
    paths = [] if folder is None else [folder / name for name in names if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class _BatchRun:
    """The state of one run."""

    def __init__(self, engine: Engine, options: Options, journal: Journal, batch_tokens: int) -> None:
        self.engine = engine
        self.options = options
        self.journal = journal
        self.batch_tokens = batch_tokens
        self.num_tokens = 0
        self._waiting: deque[tuple[list[_Asked], list[Emitted], list[tuple[int, ...]], Future[list[str]]]] = deque()

    def answered(self, left: Sequence[tuple[int, Any]], texts: TokenizerPool) -> Iterator[int]:
        """Answer prompts, and yield how many more are in the journal; what is decoded is kept where a line is wrong."""
        try:
            yield from self._answered(left, texts)
        except UsageError:
            while self._waiting:
                self._keep()
            raise

    def _answered(self, left: Sequence[tuple[int, Any]], texts: TokenizerPool) -> Iterator[int]:
        windows = [left[at : at + WINDOW] for at in range(0, len(left), WINDOW)]
        ahead = [self._tokenized(texts, windows[0])] if windows else []
        for place, window in enumerate(windows):
            tokens = ahead.pop()
            if place + 1 < len(windows):
                ahead.append(self._tokenized(texts, windows[place + 1]))
            asked = self._requests(window, [one for future in tokens for one in wait(future)])
            for batch in self._batches(asked):
                self._decode(batch, texts)
                while len(self._waiting) > _MOST_WAITING or (self._waiting and self._waiting[0][3].done()):
                    yield self._keep()
        while self._waiting:
            yield self._keep()

    @staticmethod
    def _tokenized(texts: TokenizerPool, window: Sequence[tuple[int, Any]]) -> list[Future[list[list[int] | str]]]:
        prompts = [prompt for _, prompt in window]
        return [texts.tokens(prompts[at : at + _PIECE]) for at in range(0, len(prompts), _PIECE)]

    def _requests(self, window: Sequence[tuple[int, Any]], tokens: Sequence[list[int] | str]) -> list[_Asked]:
        """Return the requests of a window, the longest first."""
        asked = []
        for (line, prompt), ids in zip(window, tokens, strict=True):
            try:
                if isinstance(ids, str):
                    raise ConfigError(ids)
                asked.append(_Asked(line, prompt, self.engine.request_for(ids, self.options)))
            except UsageError as error:
                raise type(error)(f"line {line}: {error}") from error
        return sorted(asked, key=lambda one: (-_length(one.request), one.line))

    def _batches(self, asked: Sequence[_Asked]) -> Iterator[list[_Asked]]:
        """Divide requests, which are sorted, into batches that have ``batch_tokens`` at most, or one request."""
        batch: list[_Asked] = []
        for one in asked:
            if batch and (len(batch) + 1) * _length(batch[0].request) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    def _decode(self, batch: list[_Asked], texts: TokenizerPool) -> None:
        requests = [one.request for one in batch]
        session = self.engine.session(requests, replace(self.options, batch_size=len(requests)))
        numbers = {session.admit(request): place for place, request in enumerate(requests)}
        tokens: list[list[int]] = [[] for _ in batch]
        last: dict[int, Emitted] = {}
        for emitted in session.drain():
            place = numbers[emitted.request_id]
            tokens[place] += emitted.tokens
            last[place] = emitted
        ends = [last[place] for place in range(len(batch))]
        every = [tuple(own) for own in tokens] + [other.tokens for end in ends for other in end.hypotheses[1:]]
        self.num_tokens += sum(map(len, tokens))
        self._waiting.append((batch, ends, every, texts.texts(every)))

    def _keep(self) -> int:
        """Put the oldest batch of answers into the journal, and return how many they are."""
        batch, ends, tokens, future = self._waiting.popleft()
        texts = wait(future)
        further = iter(zip(texts[len(batch) :], tokens[len(batch) :], strict=True))
        for one, end, text in zip(batch, ends, texts, strict=False):
            answer: dict[str, Any] = {"text": text, "finish_reason": end.finish_reason}
            if end.hypotheses:
                answer["score"] = end.hypotheses[0].score
                answer["alternatives"] = [
                    {"text": next(further)[0], "score": other.score} for other in end.hypotheses[1:]
                ]
            self.journal.add(one.line, one.prompt, answer)
        return len(batch)


def _length(request: Request) -> int:
    """Return the entries that a request may take, with those of its source."""
    return request.num_entries + (0 if request.source is None else len(request.source))


def _write(output: Path, answers: Sequence[dict[str, Any]]) -> None:
    """Write the answers in their order, all of them or nothing."""
    as_json = _is_jsonl(output)
    with replacing(output) as partial, partial.open("wb") as file, _packing(file, output) as packed:
        for answer in answers:
            line = json.dumps(answer, ensure_ascii=False) if as_json else " ".join(answer["text"].split())
            packed.write(f"{line}\n".encode())


def _packing(file: IO[bytes], output: Path) -> AbstractContextManager[IO[bytes]]:
    """Return what packs into an open file where the output's name asks for it; nothing of the day goes into it."""
    if output.suffix != ".gz":
        return nullcontext(file)
    return cast("AbstractContextManager[IO[bytes]]", gzip.GzipFile("", "wb", fileobj=file, mtime=0))


def _is_jsonl(path: Path) -> bool:
    """Return whether a file has one object a line, packed or not."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))

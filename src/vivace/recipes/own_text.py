"""Training text without data: prompts drawn from the model itself, and its own greedy answers to them.

A chat model continues the opening of a user's turn in its template with a prompt that it was trained to answer (Xu et
al. 2024, "Magpie", arXiv:2406.08464); a base model begins a text after its first token. Drafts have to agree with what
the model itself writes, so the prompts are answered greedily, with prompts of the user's own before them if there are
any. Where we differ: prompts are drawn at temperature 1 from all tokens, and none is filtered for its quality, since
nothing but the model's own text is learnt from. Of a conversation that is given, the user's turns are answered one
after another, each behind the model's own answers to those before it.

Prompts are drawn and answered as one stream: a sequence that ends makes room for the next at once, an answer if a
prompt waits and a draw if none does, so that every pass of the model carries the same number of rows. What texts have
in common at their beginning, the template's opening and a prompt that was drawn, is read once. Every answer is a line
of a file that a killed run continues and that can be given to other trainings (``--answers``). An answer that begins
to repeat itself ends there (``repetition.py``).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.sampling import Sampling
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.recipes.answers import MODEL_DIGITS, pair_of
from vivace.recipes.regenerate import complete_lines
from vivace.recipes.repetition import Repetition
from vivace.train.data import asked as as_asked
from vivace.train.data import next_question, written
from vivace.train.variation import Pair, digest_of
from vivace.units import format_seconds

OWN_TOKENS = 2_000_000
"""Number of tokens of text that a training without data makes."""
WRITING = 0.4
"""Share of the minutes of a whole training after which no more text is made."""
LONGEST_PROMPT = 64
"""Number of tokens at which a drawn user's turn is cut: half of a small model's turns are longer, and a sampled token
costs as much time as one of an answer."""
BASE_PROMPT = 24
"""Number of tokens of a prompt that a base model draws."""
FRUITLESS = 3
"""Drawing is given up when as many draws in a row as three times the slots have brought no new prompt."""
LEAST_ANSWER = 16
"""Prompts that leave room for fewer tokens of an answer are passed over."""
SHARED_BYTES = 128 << 20
"""Most memory for beginnings that texts share: the template's opening, and the prompt that was drawn behind it."""
NOTE_S = 20.0
"""Seconds between lines of progress."""
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Together:
    """How many texts are written together."""

    slots: int
    """Number of texts that are drawn or answered at once."""
    group: int = 1
    """Number of slots that are free before any is given to another text."""
    prompt_rows: int = 1024
    """Largest number of prompt tokens in one pass."""
    steps: int | None = None
    """Steps that a call makes before it returns to Python; None as many as show a text evenly, which nobody reads."""


ON_CPU = Together(64)
ON_GPU = Together(256, 16, 4096, 8)
"""A step of few rows leaves a GPU waiting. A pass over prompts is launched kernel by kernel there and takes as long as
several recorded steps of all texts, so that many prompts share it. To return to Python with so many texts takes as long
as ten steps."""


def together_on(device: torch.device) -> Together:
    """Return how many texts are written together on a device."""
    return ON_GPU if device.type == "cuda" else ON_CPU


@dataclass(frozen=True)
class Budget:
    """How much text to make: it ends where either is reached."""

    tokens: int
    """Number of tokens of answers."""
    minutes: float | None = None
    """Minutes of work, those before an interruption included; None has no limit."""


def with_text(values: Mapping[str, Any], *, has_data: bool) -> dict[str, Any]:
    """Return the values of a recipe for weights beside a model; without data the model writes its own."""
    return {**values} if has_data else {"own_tokens": OWN_TOKENS, **values}


def within(values: Mapping[str, Any], minutes: float | None) -> dict[str, Any]:
    """Return the values of a recipe whose text and training together take so many minutes; None leaves the recipe's.

    Raises:
        ConfigError: the minutes are not above 0.
    """
    if minutes is None:
        return dict(values)
    if minutes <= 0:
        raise ConfigError(f"--minutes must be above 0, found {minutes:g}")
    writing = WRITING * minutes if values.get("own_tokens") else 0.0
    loop = {**values.get("loop", {}), "steps": None, "minutes": minutes - writing}
    return {**values, "loop": loop, **({"own_minutes": writing} if writing else {})}


@dataclass(frozen=True)
class UserTurn:
    """What stands around a user's message in the template of a chat model."""

    opening: tuple[int, ...]
    """Tokens before the message."""
    end_tokens: frozenset[int]
    """Tokens that end the message."""
    end_text: str | None
    """Text that ends the message; None where a special token does."""
    is_chat: bool
    """Whether there is a template; a base model's prompts have no end."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> UserTurn:
        """Find the opening and the end of a user's turn by writing a placeholder with the template.

        Raises:
            UnsupportedError: there is no tokenizer, the template changes messages, or a model without a template has
                no token that begins a text.
        """
        if tokenizer.is_missing:
            raise UnsupportedError("this checkpoint has no tokenizer, so no prompts can be drawn from it")
        ends = frozenset(tokenizer.eos_ids)
        if not tokenizer.has_template:
            known = (*tokenizer.encode(""), tokenizer.inner.bos_token_id, *tokenizer.eos_ids)
            begin = next((token for token in known if token is not None), None)
            if begin is None:
                raise UnsupportedError("this model has no token that begins a text; give prompts: --data FILE")
            return UserTurn((begin,), ends, None, False)
        text = tokenizer.prompt_text([{"role": "user", "content": _PLACE}])
        before, place, after = text.rpartition(_PLACE)
        if not place:
            raise UnsupportedError("the chat template leaves out the user's message; give prompts: --data FILE")
        closing = tokenizer.encode(after.lstrip(), special=False)
        opening = tuple(tokenizer.encode(before, special=False))
        if not opening:
            raise UnsupportedError("the chat template begins with the user's message; give prompts: --data FILE")
        if closing and closing[0] in _special(tokenizer):
            return UserTurn(opening, ends | {closing[0]}, None, True)
        return UserTurn(opening, ends, after.strip().split("\n")[0] or None, True)


@dataclass
class _Answers:
    """The file of answers: what it holds, and what is added to it."""

    path: Path
    model: str
    """Short hash of the model; every row has it."""
    asked: str = ""
    """Digest of the prompts that were given, which every row has, too; empty where rows are only read."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def open(path: Path, engine: Engine, asked: str = "") -> _Answers:
        """Read the answers of an earlier run, if there are any.

        Raises:
            MismatchError: they are another model's, or other prompts than ``asked`` were given.
        """
        found = _Answers(path, base_hash(engine.folder)[:MODEL_DIGITS], asked, complete_lines(path))
        if asked and any(row.get("asked", asked) != asked for row in found.rows):
            raise MismatchError(f"{path} is text for other prompts; give --data as then, or start in an empty folder")
        strange = {str(row.get("model")) for row in found.rows} - {found.model}
        if strange:
            raise MismatchError(
                f"{path} has answers of another model ({min(strange)}, this one is {found.model}); "
                "train into another folder, or delete the file"
            )
        if found.rows:
            found.began -= float(found.rows[-1]["elapsed_s"])
        return found

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(row["tokens"] for row in self.rows)

    @property
    def elapsed_s(self) -> float:
        """Seconds of work so far."""
        return time.monotonic() - self.began

    @property
    def pairs(self) -> list[Pair]:
        """Prompts and answers, in the order of the file."""
        return list(map(pair_of, self.rows))

    def add(self, prompt: str, answer: str, tokens: int, draw: int | None, ended: bool) -> Pair:
        """Write one row, and return its pair."""
        known = {"model": self.model, "asked": self.asked, "tokens": tokens, "draw": draw, "ended": ended}
        known["elapsed_s"] = round(self.elapsed_s, 1)
        self.rows.append({**written(prompt), "reference": answer, **known})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1], ensure_ascii=False) + "\n")
        return pair_of(self.rows[-1])


def _special(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that stand for themselves and not for text."""
    added = getattr(tokenizer.inner, "added_tokens_decoder", {})
    return {*tokenizer.inner.all_special_ids, *(token for token, piece in added.items() if piece.special)}


def _alike(text: str) -> str:
    """Return what two prompts have in common that count as the same."""
    return " ".join(text.casefold().split())


class _Drawing:
    """Requests that draw prompts, and what is made of their results; no prompt is found twice."""

    def __init__(self, engine: Engine, first: int, known: Sequence[str], longest: int) -> None:
        """Go on with draw number ``first``, after the prompts ``known``; a text has ``longest`` tokens at most."""
        self._engine, self._turn = engine, UserTurn.of(engine.tokenizer)
        most = LONGEST_PROMPT if self._turn.is_chat else BASE_PROMPT
        self._limit = max(1, min(most, longest - 2 * len(self._turn.opening) - LEAST_ANSWER))
        self._numbers = count(first)
        self._known = {_alike(text) for text in known}
        self.num_drawn = self.num_empty = self.num_repeated = 0
        self._fruitless = 0

    @property
    def is_over(self) -> bool:
        """Return whether drawing on promises nothing new."""
        return self._fruitless >= FRUITLESS * together_on(self._engine.model.device).slots

    def request(self) -> tuple[int, Request]:
        """Return the number of the next draw, and the request that makes it."""
        number = next(self._numbers)
        options = Options(
            max_new_tokens=self._limit, seed=number, method="plain", stop_strings=self._turn.end_text or ()
        )
        request = self._engine.request_for(self._turn.opening, options)
        stop = replace(request.stop, end_tokens=self._turn.end_tokens)
        return number, replace(request, sampling=Sampling(do_sample=True), stop=stop)

    def found(self, tokens: Sequence[int]) -> str | None:
        """Return the prompt that a draw has written, None if it is empty or one that is known."""
        text = self._text(tokens)
        self.num_drawn += 1
        is_new = bool(text) and _alike(text) not in self._known
        self._fruitless = 0 if is_new else self._fruitless + 1
        if not text:
            self.num_empty += 1
        elif not is_new:
            self.num_repeated += 1
        else:
            self._known.add(_alike(text))
        return text if is_new else None

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._engine.tokenizer.decode(tokens)
        return (text.split(self._turn.end_text)[0] if self._turn.end_text else text).strip()

    def excuse(self) -> str:
        """Return what became of the prompts that were drawn, for a message."""
        return (
            f"of {self.num_drawn} prompts drawn from the model {self.num_empty} are empty, {self.num_repeated} repeat "
            "others"
        )


@dataclass
class _Underway:
    """A text that is being written: an answer to a prompt, or a prompt that is being drawn."""

    draw: int | None
    """Number of the draw that the prompt is of; None for one that the user gave."""
    prompt: str | None
    """What is answered; None for a prompt that is being drawn."""
    question: str | None = None
    """What it is asked for: the prompt, or the conversation that it is a turn of."""
    tokens: list[int] = field(default_factory=list)
    repetition: Repetition = field(default_factory=Repetition)
    ended: bool = False
    """Whether the model has ended it."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model has written."""
        self.tokens.extend(tokens)
        self.repetition.read(tokens)


def own_text(
    engine: Engine, path: Path, budget: Budget, longest: int, asked: Sequence[str], note: Callable[[str], None]
) -> list[Pair]:
    """Draw prompts and answer them greedily until the budget is used, continuing what a killed run has written.

    Args:
        engine: the model, with the kernels that decode.
        path: file of the answers.
        budget: how much to make.
        longest: largest number of tokens of a prompt in the template and its answer together; an answer that is longer
            ends there.
        asked: prompts of the user's own, which are answered before any that are drawn.
        note: receives lines of progress.

    Returns:
        Pairs of prompt and answer, in the order of the file.

    Raises:
        MismatchError: the file has answers of another model, or was written for other prompts.
        ConfigError: nothing could be drawn.
        UnsupportedError: the model cannot begin a text by itself.
    """
    answers = _Answers.open(path, engine, digest_of([(prompt, "") for prompt in asked]))
    if answers.rows:
        note(f"{len(answers.rows)} answers of {answers.num_tokens:,} tokens were made before")
    shares = engine.prefix_cache is None and not engine.model.stateful
    if shares:
        engine.prefix_cache = engine.new_prefix_cache(SHARED_BYTES)
    try:
        _Writing(engine, answers, budget, longest, asked, note).go()
    finally:
        if shares:
            engine.prefix_cache = None
    return answers.pairs


def written_before(engine: Engine, path: Path) -> list[Pair]:
    """Return the pairs of a file that ``own_text`` wrote.

    Raises:
        MismatchError: the answers are another model's.
    """
    return _Answers.open(path, engine).pairs


class _Writing:
    """One call of ``own_text``."""

    def __init__(
        self,
        engine: Engine,
        answers: _Answers,
        budget: Budget,
        longest: int,
        asked: Sequence[str],
        note: Callable[[str], None],
    ) -> None:
        longest = min(longest, engine.model.config.max_positions)
        self._engine, self._answers, self._budget, self._longest, self._note = engine, answers, budget, longest, note
        self._done = dict(answers.pairs)
        done = list(self._done)
        self._queue: deque[tuple[int | None, str]] = deque((None, question) for question in asked)
        first = max((row["draw"] for row in answers.rows if row["draw"] is not None), default=-1) + 1
        self._drawing = _Drawing(engine, first, [*done, *asked], longest)
        self._together = together_on(engine.model.device)
        self._session = Session(
            engine.model,
            num_slots=self._together.slots,
            capacity=longest,
            prefill_budget=self._together.prompt_rows,
            steps_per_call=self._together.steps,
            memory=engine.memory,
        )
        self._running: dict[int, _Underway] = {}
        self._made = self._before = answers.num_tokens
        self._began = self._told = time.monotonic()
        self._spent_before = self._spent

    @property
    def _spent(self) -> float:
        """Return the share of the budget that is used."""
        share = self._made / self._budget.tokens
        minutes = self._budget.minutes
        return share if minutes is None else max(share, self._answers.elapsed_s / (60 * minutes))

    def go(self) -> None:
        """Answer prompts until the budget is used or no new one is drawn."""
        try:
            while self._spent < 1 and self._fill():
                for text in self._finished():
                    if text.prompt is not None:
                        self._keep(text.prompt, text)
                    elif (prompt := self._drawing.found(text.tokens)) is not None:
                        self._queue.append((text.draw, prompt))
                self._tell()
            if len(self._answers.rows) < self._together.slots:
                self._cut()
        finally:
            self._session.close()

    def _keep(self, prompt: str, text: _Underway) -> None:
        """Write an answer to the file; the next turn of its conversation, if there is one, waits first."""
        self._made += len(text.tokens)
        answer = self._engine.tokenizer.decode(text.tokens)
        _, self._done[prompt] = self._answers.add(prompt, answer, len(text.tokens), text.draw, text.ended)
        if text.question is not None:
            self._queue.appendleft((text.draw, text.question))

    def _cut(self) -> None:
        """Write answers as far as they are: a budget too short for one round of them would leave nothing."""
        for text in self._running.values():
            if text.prompt is not None and len(text.tokens) >= LEAST_ANSWER:
                self._keep(text.prompt, text)

    def _fill(self) -> bool:
        """Give free slots to prompts, and to draws where none wait, as soon as a group of them is free; return whether
        any text is being written.
        """
        if self._running and self._together.slots - len(self._running) < self._together.group:
            return True
        while len(self._running) < self._together.slots:
            if self._queue:
                number, question = self._queue.popleft()
                prompt = next_question(question, self._done)
                if prompt is None:
                    continue
                tokens = self._engine.tokenizer.encode_prompt(as_asked(prompt))
                if len(tokens) < self._longest - LEAST_ANSWER:
                    options = Options(max_new_tokens=self._longest - len(tokens), do_sample=False, method="plain")
                    self._admit(self._engine.request_for(tokens, options), _Underway(number, prompt, question))
            elif not self._drawing.is_over:
                number, request = self._drawing.request()
                self._admit(request, _Underway(number, None))
            else:
                break
        if not self._running and not self._answers.rows:
            raise ConfigError(f"{self._drawing.excuse()}; give prompts of your own: --data FILE")
        if not self._running:
            self._note(f"no new prompt is drawn any more: {self._drawing.excuse()}")
        return bool(self._running)

    def _admit(self, request: Request, text: _Underway) -> None:
        self._running[self._session.admit(request)] = text

    def _finished(self) -> Iterator[_Underway]:
        """Make one step, and yield every text that ends in it."""
        for emitted in self._session.step():
            if emitted.error is not None:
                raise emitted.error
            self._running[emitted.request_id].add(emitted.tokens)
            if emitted.finish_reason is not None:
                self._running[emitted.request_id].ended = emitted.finish_reason == "stop"
                yield self._running.pop(emitted.request_id)
        for number, text in list(self._running.items()):
            if text.prompt is not None and text.repetition.is_found:
                self._session.cancel(number)
                yield self._running.pop(number)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told < NOTE_S:
            return
        self._told, rate = now, (self._made - self._before) / (now - self._began)
        found = f"{len(self._answers.rows)} answers, {self._made:,} tokens, {rate:.0f} tokens/s"
        if (gained := self._spent - self._spent_before) > 0:
            found += f", {format_seconds(max(0.0, 1 - self._spent) * (now - self._began) / gained)} left"
        self._note(found)

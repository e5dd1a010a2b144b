"""Batches of token rows, made from pairs of a prompt and an answer.

A row consists of the prompt (in the chat template, where the tokenizer has one), the answer and the end-of-text token;
only the answer and that last token are scored. A conversation becomes a row for each turn of the assistant. A batch
holds about ``tokens_per_batch`` tokens, padding included, and its rows are padded to the same multiple of 8. All random
choices of epoch n come from a generator seeded with (seed, n), so two numbers, the epoch and the batch, describe a
place in training, and a resumed run sees the batches that the killed one would have seen.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.errors import CapacityError, ConfigError
from vivace.prompts import Message, Prompt
from vivace.train.batches import BatchPlace, BOut
from vivace.train.objective import Objective
from vivace.train.variation import Pair

_EMPTY = 1000
"""Epochs without a row after which a training ends."""
_GRID = 8  # row lengths are multiples of this, so that few shapes occur


@dataclass(frozen=True)
class Row:
    """A training example as token ids."""

    tokens: tuple[int, ...]
    num_prompt: int
    """Number of prompt tokens, chat template included; the tokens after them are scored."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens that are padded on the right to a common length T."""

    tokens: Tensor
    """(B, T) int64 token ids."""
    scored: Tensor
    """(B, T) bool: True where the token is to be predicted from those before it (tokens of an answer)."""

    @property
    def num_elements(self) -> int:
        """Number of tokens, padding included."""
        return self.tokens.numel()

    @property
    def weight(self) -> int:
        """Return the number of scored tokens."""
        return int(self.scored.sum())

    @property
    def predicting(self) -> Tensor:
        """Packed rows b * T + t whose next token is scored, (n,)."""
        return F.pad(self.scored[:, 1:], (0, 1)).reshape(-1).nonzero()[:, 0]

    @property
    def targets(self) -> Tensor:
        """The tokens that follow the rows of ``predicting``, (n,)."""
        return self.tokens.reshape(-1)[self.predicting + 1]

    @property
    def before_padding(self) -> Tensor:
        """Packed rows up to the last scored token of each text, (n,)."""
        return self.scored.flip(1).int().cummax(1).values.flip(1).reshape(-1).nonzero()[:, 0]


def sample_of(batches: Sequence[TokenBatch], tokens: int) -> list[TokenBatch]:
    """Return as many batches as have so many tokens, or all; they are sorted by length, so those taken are any."""
    found, left = [], tokens
    for batch in random.Random(0).sample(batches, len(batches)):
        if left > 0:
            found.append(batch)
            left -= batch.num_elements
    return found


DecoderObjective = Objective[Decoder, TokenBatch]
"""An objective whose model is a decoder and whose batches are rows of tokens."""
Draw = Callable[[random.Random, int], Sequence[Pair]]
"""A function that returns the pairs of an epoch, given a generator seeded for that epoch and the epoch's number."""


class Turns(str):
    """The turns before an answer, in place of a prompt's text: JSON, since pairs are of texts."""

    @staticmethod
    def of(messages: Sequence[Message]) -> Turns:
        """Return turns as a prompt."""
        return Turns(json.dumps(list(messages), ensure_ascii=False))

    @property
    def messages(self) -> list[Message]:
        """Return the turns, as the chat template takes them."""
        found: list[Message] = json.loads(self)
        return found


class Unended(str):
    """An answer that was cut before its end, so that no end-of-text token follows it."""


class Untold(str):
    """The empty prompt of a piece of plain text, which no template wraps."""


PIECE = 600
"""Most characters of a piece of plain text."""


def pieces_of(text: str) -> list[Prompt]:
    """Divide plain text, where it has spaces, into pieces that are learnt from as they are."""
    pieces = re.findall(rf".{{1,{PIECE}}}\Z|.{{1,{PIECE - 1}}}\s|.{{{PIECE}}}", text, re.DOTALL)
    return [Prompt(Untold(), (Unended(piece),)) for piece in pieces if piece.strip()]


def asked(prompt: str) -> str | list[Message]:
    """Return the prompt of a pair as ``Tokenizer.encode_prompt`` takes it."""
    return prompt.messages if isinstance(prompt, Turns) else prompt


def check_turns(prompt: Prompt) -> None:
    """Refuse a conversation from which nothing could be learnt.

    Raises:
        ValueError: its turns are not in order, or none of them is the assistant's.
    """
    if not _is_conversation(prompt):
        return
    turns = cast("list[Message]", prompt.request)
    roles = [turn["role"] for turn in turns]
    said = roles[1:] if roles[0] == "system" else roles
    for place, role in enumerate(said):
        if role != ("user", "assistant")[place % 2]:
            number = place + len(roles) - len(said)
            raise ValueError(
                f'"messages"[{number}] is of {role!r}; a system turn may come first, then user and assistant in turn'
            )
    if len(said) % 2 == 0 and prompt.references:
        raise ValueError('"messages" end with the assistant, so there is nothing for "reference" to answer')
    if len(said) < 2 and not prompt.references:
        raise ValueError('"messages" have no turn of the assistant, and there is no "reference": nothing to learn')
    if any(turn["role"] == "assistant" and not turn["content"].strip() for turn in turns):
        raise ValueError("a turn of the assistant is empty")


def check_questions(prompt: Prompt) -> None:
    """Refuse a conversation in which a model could answer nothing.

    Raises:
        ValueError: it has no turn of the user, or one of another role than system (which comes first), user, assistant.
    """
    if not _is_conversation(prompt):
        return
    roles = [turn["role"] for turn in cast("list[Message]", prompt.request)]
    for place, role in enumerate(roles):
        if role not in ("user", "assistant") and (role, place) != ("system", 0):
            raise ValueError(
                f'"messages"[{place}] is of {role!r}; a system turn may come first, then user and assistant'
            )
    if "user" not in roles:
        raise ValueError('"messages" have no turn of the user: nothing to answer')


def _is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt.request, str) and isinstance(prompt.request[0], dict)


def pairs_of(prompts: Sequence[Prompt]) -> list[Pair]:
    """Return one pair of prompt and answer for each reference, and for each turn of the assistant in a conversation.

    The turns before it are the prompt of such a turn. So every one of them is learnt from what the chat template makes
    of the turns before it, as when the model answers it, and no other turn is.

    Raises:
        ConfigError: no prompt has an answer, a conversation has turns in the wrong order, or a row has token ids.
    """
    pairs = [pair for number, prompt in enumerate(prompts, 1) for pair in pairs_of_row(prompt, number)]
    if not pairs:
        raise ConfigError(f'none of {len(prompts)} rows has a "reference" to learn; regenerate answers first')
    return pairs


def pairs_of_row(prompt: Prompt, number: int) -> list[Pair]:
    """Return the pairs of one row, as ``pairs_of`` does; ``number`` names it in errors."""
    if not _is_conversation(prompt):
        [text] = texts_of([prompt])
        return [(text, answer) for answer in prompt.references]
    try:
        check_turns(prompt)
    except ValueError as error:
        raise ConfigError(f"row {number}: {error}") from error
    turns = cast("list[Message]", prompt.request)
    said = [
        (Turns.of(turns[:place]), turn["content"]) for place, turn in enumerate(turns) if turn["role"] == "assistant"
    ]
    return [*said, *((Turns.of(turns), answer) for answer in prompt.references)]


def shuffled_groups(pairs: Sequence[Pair], seed: int) -> list[list[Pair]]:
    """Return pairs in a random order, those together that tell of each other: answers to one prompt, and turns of
    conversations that begin alike. Where one of a group is learnt from, another says little about new prompts.
    """
    groups: dict[object, list[Pair]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(_beginning(pair[0], number), []).append(pair)
    found = list(groups.values())
    random.Random(seed).shuffle(found)
    return found


def _beginning(prompt: str, number: int) -> object:
    """Return what the prompts of a group have in common; ``number`` is that of the pair, for a piece of plain text."""
    if isinstance(prompt, Untold):
        return number
    if not isinstance(prompt, Turns):
        return prompt
    said = prompt.messages
    first = next((place for place, turn in enumerate(said) if turn["role"] == "user"), 0)
    return Turns.of(said[: first + 1])


def take_groups(groups: list[list[Pair]], count: int) -> list[Pair]:
    """Take whole groups from the front of a list until they have so many pairs, or none is left."""
    found: list[Pair] = []
    while groups and len(found) < count:
        found += groups.pop(0)
    return found


def texts_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the text of each prompt, in order.

    Raises:
        ConfigError: one is a conversation, or token ids.
    """
    texts = [prompt.request for prompt in prompts if isinstance(prompt.request, str)]
    if len(texts) < len(prompts):
        other = next(prompt for prompt in prompts if not isinstance(prompt.request, str))
        found = '"messages"' if _is_conversation(other) else 'token ids as "prompt"'
        raise ConfigError(f'this takes rows whose "prompt" is a text; found a row with {found}')
    return texts


def questions_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return what a model is to answer, in order: the text of each prompt, the turns of a conversation as ``Turns``.

    Of a conversation the system's and the user's turns are left; what stood between them the model writes itself.

    Raises:
        ConfigError: a prompt is of token ids.
    """
    found = list[str]()
    for prompt in prompts:
        if _is_conversation(prompt):
            turns = cast("list[Message]", prompt.request)
            found.append(Turns.of([turn for turn in turns if turn["role"] != "assistant"]))
        else:
            found += texts_of([prompt])
    return found


def next_question(question: str, answers: Mapping[str, str]) -> str | None:
    """Return what is to be answered next of a prompt, or of a conversation; None where nothing is left.

    Args:
        question: one of ``questions_of``.
        answers: answers by prompt, so far. One that was cut ends its conversation.
    """
    if not isinstance(question, Turns):
        return None if question in answers else question
    said = list[Message]()
    for turn in question.messages:
        said.append(turn)
        if turn["role"] != "user":
            continue
        prompt = Turns.of(said)
        if prompt not in answers:
            return prompt
        if isinstance(answers[prompt], Unended):
            return None
        said.append({"role": "assistant", "content": answers[prompt]})
    return None


def written(prompt: str) -> dict[str, object]:
    """Return the prompt of a pair as a row of a prompt file has it."""
    return {"messages": prompt.messages} if isinstance(prompt, Turns) else {"prompt": prompt}


def read_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of a pair from a row that has what ``written`` returns."""
    return Turns.of(row["messages"]) if "messages" in row else str(row["prompt"])


R = TypeVar("R")
"""Type of an example as token ids."""


class RowKind(Protocol[R, BOut]):
    """How pairs become examples, and examples batches."""

    def encode(self, pairs: Sequence[Pair]) -> list[R]:
        """Encode pairs in order, leaving out those that are too long."""
        ...

    def grouped(self, rows: Sequence[R], tokens_per_batch: int, rng: random.Random | None = None) -> list[list[R]]:
        """Divide examples into batches; ``rng`` shuffles them."""
        ...

    def collate(self, rows: Sequence[R]) -> BOut:
        """Make a batch."""
        ...


class Rows:
    """Encodes pairs as rows of at most ``longest`` tokens."""

    def __init__(
        self, tokenizer: Tokenizer, longest: int, device: torch.device | None = None, *, cuts: bool = False
    ) -> None:
        """Set the tokenizer, the length limit and the device that batches are made for (None is the CPU).

        Rows beyond the limit are left out, or end there if ``cuts``, as pieces of plain text always do.

        Raises:
            ConfigError: the tokenizer has no end-of-text token, which rows end with.
        """
        if not tokenizer.eos_ids:
            raise ConfigError("the tokenizer has no end-of-text token, so a model could not learn to stop")
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_ids[0]
        self._longest = longest
        self._cuts = cuts
        self.device = device

    def encode(self, pairs: Sequence[Pair]) -> list[Row]:
        """Encode pairs in order, leaving out or cutting those that are longer than the limit.

        Pieces of one token are left out, too, since nothing in them is predicted.

        Raises:
            CapacityError: all pairs are left out.
        """
        if not pairs:
            return []
        tokenizer = self._tokenizer
        given = [self._template(prompt) for prompt, _ in pairs]
        answered = [answer for _, answer in pairs]
        prompts = tokenizer.inner(given, add_special_tokens=not tokenizer.has_template, verbose=False)["input_ids"]
        answers = tokenizer.inner(answered, add_special_tokens=False, verbose=False)["input_ids"]
        ends = [() if isinstance(answer, Unended) else (self._end,) for _, answer in pairs]
        rows = [Row((*p, *a, *end), max(1, len(p))) for p, a, end in zip(prompts, answers, ends, strict=True)]
        rows = [
            Row(row.tokens[: self._longest], row.num_prompt) if self._cuts or isinstance(prompt, Untold) else row
            for row, (prompt, _) in zip(rows, pairs, strict=True)
            if row.num_prompt < self._longest or not self._cuts
        ]
        kept = [row for row in rows if row.num_prompt < len(row.tokens) <= self._longest]
        if not kept:
            shortest = min(len(p) + 1 if self._cuts else len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
            raise CapacityError(
                f"the shortest of {len(pairs)} rows has {shortest} tokens or more, the limit is {self._longest}"
            )
        return kept

    def note_left_out(self, pairs: Sequence[Pair], note: Callable[[str], None]) -> None:
        """Say how many pairs are left out, if any.

        Raises:
            CapacityError: all of them are.
        """
        if left_out := len(pairs) - len(self.encode(pairs)):
            note(f"{left_out} of {len(pairs)} rows have more than {self._longest} tokens and are left out")

    def batches(self, pairs: Sequence[Pair], tokens_per_batch: int) -> list[TokenBatch]:
        """Return batches that hold each pair once, in order of length, at most ``tokens_per_batch`` tokens each."""
        return [collate(group, self.device) for group in grouped(self.encode(pairs), tokens_per_batch)]

    def grouped(self, rows: Sequence[Row], tokens_per_batch: int, rng: random.Random | None = None) -> list[list[Row]]:
        """Divide rows into batches of the same padded length, as ``grouped`` does."""
        return grouped(rows, tokens_per_batch, rng)

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """Make a batch of rows, as ``collate`` does."""
        return collate(rows, self.device)

    def _template(self, prompt: str) -> str:
        if isinstance(prompt, Turns):
            return self._tokenizer.prompt_text(prompt.messages)
        if not self._tokenizer.has_template or isinstance(prompt, Untold):
            return prompt
        return self._tokenizer.prompt_text([{"role": "user", "content": prompt}])


class Batches(Generic[R, BOut]):
    """The batches of every epoch (a ``BatchSource``)."""

    def __init__(self, draw: Draw, rows: RowKind[R, BOut], *, tokens_per_batch: int, seed: int = 0) -> None:
        """Set where the batches come from and how large they are.

        Args:
            draw: returns the pairs of an epoch.
            rows: encodes the pairs.
            tokens_per_batch: upper bound on B * T; a longer row is a batch of its own.
            seed: seed of every random choice.

        Raises:
            ConfigError: ``tokens_per_batch`` is smaller than the shortest padded row.
        """
        if tokens_per_batch < _GRID:
            raise ConfigError(f"tokens_per_batch must be at least {_GRID}, found {tokens_per_batch}")
        self._draw = draw
        self._rows = rows
        self._tokens = tokens_per_batch
        self._seed = seed

    def start_at(self, place: BatchPlace) -> Iterator[tuple[BatchPlace, BOut]]:
        """Yield endless batches from ``place`` on, each together with the place that follows it.

        Raises:
            ConfigError: no row was drawn in many epochs.
        """
        epoch, first, empty = place.epoch, place.index, 0
        while True:
            groups = self.epoch(epoch)
            empty = 0 if groups else empty + 1
            if empty == _EMPTY:
                raise ConfigError(
                    f"no row was drawn in {_EMPTY} epochs; raise the shares of the recipe, or give more rows"
                )
            for index in range(first, len(groups)):
                yield BatchPlace(epoch, index + 1), self._rows.collate(groups[index])
            epoch, first = epoch + 1, 0

    def epoch(self, number: int) -> list[list[R]]:
        """Return the rows of each batch of an epoch, in the order in which they are trained on."""
        rng = random.Random(f"{self._seed}/{number}")
        try:
            rows = self._rows.encode(self._draw(rng, number))
        except CapacityError:  # the few that were drawn are all too long
            return []
        return self._rows.grouped(rows, self._tokens, rng)


def grouped(rows: Sequence[Row], tokens_per_batch: int, rng: random.Random | None = None) -> list[list[Row]]:
    """Divide rows into batches of the same padded length.

    Args:
        rows: encoded examples.
        tokens_per_batch: upper bound on the tokens of a batch, padding included.
        rng: shuffles rows within a length, then the batches; None keeps the rows in order of length.
    """
    by_length: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[_padded(len(row.tokens))].append(row)
    groups = []
    for length in sorted(by_length):
        alike = by_length[length]
        if rng is not None:
            rng.shuffle(alike)
        count = max(1, tokens_per_batch // length)
        groups += [alike[first : first + count] for first in range(0, len(alike), count)]
    if rng is not None:
        rng.shuffle(groups)
    return groups


def collate(rows: Sequence[Row], device: torch.device | None = None) -> TokenBatch:
    """Make a batch of rows, padded on the right with token 0; padding is neither scored nor read by other tokens.

    Args:
        rows: what it holds.
        device: where it is made; None is the CPU.
    """
    length = _padded(max(len(row.tokens) for row in rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    scored = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        scored[index, row.num_prompt : len(row.tokens)] = True
    return TokenBatch(tokens.to(device), scored.to(device))


def _padded(length: int) -> int:
    return -(-length // _GRID) * _GRID

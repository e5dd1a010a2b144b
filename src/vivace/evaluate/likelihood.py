"""How likely a model finds the ways in which a text may go on: the measure behind choices, continuations, perplexity.

A *question* is a context and its *options*. The log-likelihood of an option is ``sum_t ln p(token t | context, tokens
before t)``. The context is read once, as a prompt; the options then branch off its last token as the branches of one
draft, whose rows see the context and their own branch. So all options take one pass that reads the weights once, and
everything that a session's rows may carry (adapters, ranks, quantized entries) is carried here, too.

``dense_logits`` reads context and option as one text for each option. It is the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vivace.adapters.pool.pool import PromptPool
from vivace.adapters.registry import Registry
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.cache import KVCache
from vivace.core.draft import Draft, RowLists
from vivace.core.low_rank import AdapterSource
from vivace.core.model import Decoder
from vivace.core.seams import SlotState
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass, threads_of
from vivace.decode.prefix import CHUNK
from vivace.decode.request import Lead
from vivace.errors import CapacityError, ConfigError, UnsupportedError

BRANCH_ROWS = 64
"""Rows of branches in one pass; a branch is never divided."""

Tokens = Sequence[int]


@dataclass(frozen=True)
class ContextOptions:
    """A context and the ways in which it may go on, in tokens."""

    context: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.context or not self.options or not all(self.options):
            raise ConfigError("a context, and each of its options, has at least one token")


@dataclass(frozen=True)
class Likelihood:
    """What a model thinks of one option."""

    total: float
    """Its log-likelihood, in nats."""
    num_tokens: int
    is_greedy: bool
    """Whether each of its tokens is the likeliest one."""


class ScoredOptions(Protocol):
    """The part of an engine that is used here."""

    model: Decoder
    tokenizer: Tokenizer
    adapters: Registry
    prompt_pool: PromptPool | None


def log_likelihoods(
    engine: ScoredOptions,
    rows: Sequence[tuple[str | Tokens, Sequence[str | Tokens]]],
    *,
    adapter: str | None = None,
) -> list[list[Likelihood]]:
    """Return how likely an engine finds the options of each context.

    Args:
        engine: any engine; what its weights, ranks or wire are like is its own affair.
        rows: contexts with their options, as text or as token ids.
        adapter: name of the LoRA that all rows wear; None is the one that the engine wears by default, if any.

    Raises:
        ConfigError: a context or an option is empty.
        CapacityError: a text is longer than the model's context.
    """
    reader = LikelihoodReader(engine.model, engine.adapters.worn(adapter))
    found = []
    for context, options in rows:
        question = question_of(engine.tokenizer, context, options)
        found.append([likelihood(*each) for each in zip(reader.logits(question), question.options, strict=True)])
    return found


def question_of(tokenizer: Tokenizer, context: str | Tokens, options: Sequence[str | Tokens]) -> ContextOptions:
    """Return a question in tokens.

    Text is encoded whole, context and option together, and divided where all options and the context alone still have
    the same tokens. So an option has the tokens that it has in the text, also where a token spans the border.
    """
    if not isinstance(context, str):
        return ContextOptions(tuple(context), tuple(_ids(tokenizer, option) for option in options))
    alone = tokenizer.encode(context)
    wholes = [
        tokenizer.encode(context + option) if isinstance(option, str) else [*alone, *option] for option in options
    ]
    shared = min(len(alone), *(len(whole) - 1 for whole in wholes))
    while shared > 1 and any(whole[:shared] != alone[:shared] for whole in wholes):
        shared -= 1
    return ContextOptions(tuple(alone[:shared]), tuple(tuple(whole[shared:]) for whole in wholes))


def _ids(tokenizer: Tokenizer, option: str | Tokens) -> tuple[int, ...]:
    return tuple(tokenizer.encode(option, special=False) if isinstance(option, str) else option)


def likelihood(logits: Tensor, option: Tokens) -> Likelihood:
    """Return the log-likelihood of an option from the logits before each of its tokens, (n, V)."""
    at = logits.new_tensor(option).long()
    total = logits.log_softmax(-1).gather(1, at[:, None]).double().sum()
    return Likelihood(float(total), len(option), bool((logits.argmax(-1) == at).all()))


def dense_logits(model: Decoder, question: ContextOptions) -> list[Tensor]:
    """Return the same as ``Reader.logits`` from whole texts, each read without a cache: the oracle."""
    found = []
    for option in question.options:
        tokens = torch.tensor([*question.context, *option[:-1]], device=model.device)
        step = Step.dense(1, len(tokens), device=model.device)
        top = model.run(model.embed(tokens, step), step)
        found.append(model.head(top[len(question.context) - 1 :]).float())
    return found


class LikelihoodReader:
    """Reads questions with a model, natively where it has native kernels."""

    def __init__(self, model: Decoder, adapter: AdapterSource | None = None) -> None:
        """Read with a model whose rows wear an adapter, or none.

        Raises:
            UnsupportedError: what the model says of a text depends on a source.
        """
        if model.encoder is not None:
            raise UnsupportedError("options of an encoder-decoder model depend on its source, and are not scored")
        self.model = model
        self.adapter = adapter

    @torch.inference_mode()
    def logits(self, question: ContextOptions, lead: Lead | None = None) -> list[Tensor]:
        """Return the logits before each token of each option, (tokens of the option, V) float32 each.

        Args:
            question: what is read.
            lead: the soft prompt in front of it, or None.

        Raises:
            CapacityError: a text is longer than the model's context.
        """
        model = self.model
        num_leading = 0 if lead is None else lead.count
        longest = num_leading + len(question.context) + max(map(len, question.options)) - 1
        if longest > model.config.max_positions:
            behind = f" behind a soft prompt of {num_leading}" if num_leading else ""
            raise CapacityError(
                f"a context with its option has {longest + 1 - num_leading} tokens{behind}; the context of this model "
                f"holds {model.config.max_positions}"
            )
        rows = 1 + sum(len(option) - 1 for option in question.options)
        cache = model.new_cache(1, num_leading + len(question.context) + rows)
        states: list[SlotState] = [cache, *(part.open(cache) for part in model.stateful)]
        try:
            cache.adapters.give(0, self.adapter)
            if lead is not None:
                lead.attach(0, cache)
            cache.prompts[0] = len(question.context)
            with threads_of(model):
                tops = self._branches(question, cache, states)
            return [model.head(top).float() for top in tops]
        finally:
            for state in states:
                state.release([0])

    def _branches(self, question: ContextOptions, cache: KVCache, states: Sequence[SlotState]) -> list[Tensor]:
        """Return the residuals before each token of each option."""
        context = question.context
        if len(question.options) == 1:  # a chain: read as a prompt, however long
            tokens = (*context, *question.options[0][:-1])
            tops = [self._chunk(tokens[at : at + CHUNK], cache, states) for at in range(0, len(tokens), CHUNK)]
            return [torch.cat(tops)[len(context) - 1 :]]
        for at in range(0, len(context) - 1, CHUNK):
            self._chunk(context[:-1][at : at + CHUNK], cache, states)
        found = []
        for group in _groups(question.options):
            draft, places = _branching(context[-1], group, self.model.device)
            top = ForwardPass().run(self.model, draft, cache).hidden
            for state in states:
                state.commit([0], [[]])
            found += [top[torch.tensor(rows, device=top.device)] for rows in places]
        return found

    def _chunk(self, tokens: Tokens, cache: KVCache, states: Sequence[SlotState]) -> Tensor:
        """Read and commit the next tokens of the slot; return their residuals."""
        draft = Draft.committed_only({0: tokens}, is_prompt=True, device=self.model.device)
        top = ForwardPass().run(self.model, draft, cache, chunk=True).hidden
        for state in states:
            state.commit([0], [range(len(tokens))])
        return top


def _groups(options: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """Yield options in order, as many together as fit into one pass, at least one."""
    group: list[Tokens] = []
    count = 0
    for option in options:
        if group and count + len(option) - 1 > BRANCH_ROWS:
            yield group
            group, count = [], 0
        group.append(option)
        count += len(option) - 1
    yield group


def _branching(root: int, options: Sequence[Tokens], device: torch.device) -> tuple[Draft, list[list[int]]]:
    """Return a draft whose branches are options, and for each option the rows whose residuals are before its tokens.

    The last token of an option is not read, since nothing is asked after it.
    """
    tokens, parent = [root], [-1]
    places = []
    for option in options:
        rows = [0]
        for token in option[:-1]:
            parent.append(rows[-1])
            rows.append(len(tokens))
            tokens.append(token)
        places.append(rows)
    count = len(tokens)
    numbers = torch.tensor([tokens, [0] * count, list(range(count)), parent], device=device)
    draft = Draft(
        (0,),
        (1,),
        tokens=numbers[0],
        slot=numbers[1],
        node=numbers[2],
        parent=numbers[3],
        known=RowLists(tokens, [0] * count, list(range(count)), parent),
    )
    return draft, places

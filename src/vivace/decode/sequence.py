"""A request while it is in a slot, and what a pass decides for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from vivace.core.seams import Draft, DraftState, TargetPass, Verdict
from vivace.decode.memory import Promise
from vivace.decode.prefill import PrefillState, PromptPiece
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.stats import DecodeStats


@dataclass
class Sequence:
    """A request while it is in a slot."""

    id: int
    request: Request
    slot: int
    tokens: list[int]
    """Prompt and new tokens; all but the last are stored."""
    drafting: DraftState
    """The session's state of the request's drafter, shared with its other requests of that method."""
    prefilling: PrefillState
    """The session's state of the way in which its prompt is read."""
    promise: Promise
    """Of the memory for its keys and values."""
    generator: torch.Generator
    stats: DecodeStats
    admitted_at: float
    first_at: float = 0.0
    pieces: deque[PromptPiece] = field(default_factory=deque)
    """Work on the prompt that is still to be done."""
    shown: list[Tensor] = field(default_factory=list)
    """Residuals at the top of the prompt so far, (n, E) each, where a prefix cache is to keep them."""
    num_passes: int = 0
    """Passes it has come through, of its prompt and of its answer."""

    @property
    def num_new(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[len(self.request.tokens) :]


@dataclass
class Block:
    """What a pass decided for one sequence, before it is cut where the text ends; lists run beside ``tokens``."""

    rows: list[int]
    """Draft rows they follow."""
    tokens: list[int]
    guessed: list[int] = field(default_factory=list)
    """Depths of the guesses made."""
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    guesses: list[tuple[int, ...]] | None = None

    def take_logprobs(self, logprobs: Tensor, num_top: int) -> None:
        """Read log p of the tokens, and of the likeliest ones, off the rows they follow, (n, V)."""
        self.logprobs = logprobs.gather(1, torch.tensor(self.tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        if num_top:
            values, tokens = logprobs.topk(num_top)
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            self.top_logprobs = [tuple(zip(ids, logs, strict=True)) for ids, logs in pairs]

    def take_guesses(self, draft: Draft, children: list[list[int]]) -> None:
        """Read what was guessed behind the rows."""
        self.guesses = [tuple(draft.lists.tokens[child] for child in children[row]) for row in self.rows]

    def emitted(self, kept: int, sequence: Sequence, reason: FinishReason | None) -> Emitted:
        """The first ``kept`` tokens and what belongs to them."""
        return Emitted(
            sequence.id,
            tuple(self.tokens[:kept]),
            None if self.logprobs is None else tuple(self.logprobs[:kept]),
            reason,
            sequence.stats,
            None if self.top_logprobs is None else tuple(self.top_logprobs[:kept]),
            None if self.guesses is None else tuple(self.guesses[:kept]),
        )


def blocks_of(draft: Draft, verdict: Verdict) -> list[list[Block]]:
    """What each step of each slot decided."""
    tokens, blocks = draft.lists.tokens, []
    for path, next_token, steps in zip(verdict.paths, verdict.next_tokens, verdict.steps, strict=True):
        path = path[len(path) - sum(step.kept for step in steps) :]
        following = [*(tokens[row] for row in path[1:]), next_token]
        stops = accumulate(step.kept for step in steps)
        spans = [(slice(stop - step.kept, stop), step) for stop, step in zip(stops, steps, strict=True)]
        blocks.append([Block(list(path[s]), following[s], list(step.guessed)) for s, step in spans])
    return blocks


def by_drafting(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Sequences that are drafted for together."""
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(id(sequence.drafting), []).append(sequence)
    return list(groups.values())


def count_exits(passed: TargetPass, verdict: Verdict, sequences: list[Sequence], num_layers: int) -> None:
    """Tell each sequence where the rows left that its new tokens follow, and the layer passes spent on all its rows."""
    assert passed.depth is not None
    assert passed.work is not None
    depth, work = passed.depth.tolist(), passed.work.tolist()
    for sequence, path, accepted in zip(sequences, verdict.paths, verdict.accepted, strict=True):
        last = path[len(path) - accepted - 1 :]
        sequence.stats.count_exits([depth[row] for row in last], num_layers, sum(work[row] for row in path))

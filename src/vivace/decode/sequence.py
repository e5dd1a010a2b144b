"""A request while it occupies a slot, and the tokens that a pass yields for it."""

from __future__ import annotations

import copy
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from vivace.core.draws import Drawing
from vivace.core.seams import Draft, DraftState, TargetPass, Verdict
from vivace.decode.beams import BeamSearch
from vivace.decode.guarding import Withheld
from vivace.decode.memory import DRAFT_SLACK
from vivace.decode.prefill import PrefillState, PromptPiece
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.stats import DecodeStats
from vivace.errors import DecodingError


@dataclass(eq=False)
class Sequence:
    """A request while it occupies a slot."""

    id: int
    request: Request
    slot: int
    tokens: list[int]
    """Prompt and new tokens; all but the last are stored in the cache."""
    drafting: DraftState
    """The session's state of the request's drafter, shared with other requests of that method."""
    prefilling: PrefillState
    """The session's state of the request's prefill."""
    generator: torch.Generator
    stats: DecodeStats
    admitted_at: float
    first_at: float = 0.0
    pieces: deque[PromptPiece] = field(default_factory=deque)
    """Pieces of the prompt that are still to be read."""
    shown: list[Tensor] = field(default_factory=list)
    """Residuals of what is stored so far after the last layer, (n, E) each, where a prefix cache is to keep them."""
    is_pinned: bool = False
    """It keeps its slot until it ends: what it has stored could not be read again."""
    num_passes: int = 0
    """Number of passes it has taken part in, prefill and decoding."""
    search: BeamSearch | None = None
    """Its beams, which begin again where it lost its slot."""
    guarded: Withheld | None = None
    """Its tokens that a guard has not judged yet; None without a guard."""
    num_certain: int = 0
    """Number of new tokens that all beams have in common and that are emitted."""

    @cached_property
    def drawing(self) -> Drawing | None:
        """How native code draws its tokens; None where it takes the likeliest, or where more than that is asked."""
        if not self.request.is_drawn_from_logits:
            return None
        return Drawing(self.generator.initial_seed(), self.request.sampling.temperature, self.request.sampling.top_p)

    def forked(self, number: int, slot: int, seed: int | None) -> Sequence:
        """Return another sequence that begins with all that this one has so far.

        Args:
            number: its id.
            slot: its slot.
            seed: of its random numbers; None goes on with those of this one.
        """
        generator = torch.Generator()
        if seed is None:
            generator.set_state(self.generator.get_state())
        else:
            generator.manual_seed(seed)
        return replace(
            self,
            id=number,
            slot=slot,
            tokens=list(self.tokens),
            generator=generator,
            stats=copy.deepcopy(self.stats),
            pieces=deque(),
            shown=list(self.shown),
            guarded=None if self.guarded is None else self.guarded.forked(),
        )

    @property
    def num_entries(self) -> int:
        """Return the number of entries that it may come to have, those of drafts included."""
        return self.request.num_entries + DRAFT_SLACK

    @property
    def shares(self) -> bool:
        """Return whether its prompt uses the prefix cache: only where its entries are exactly the model's own."""
        request, adapter = self.request, self.request.adapter
        has_name = adapter is None or adapter.version is not None
        return request.prefix is not None and request.prefill.is_exact and has_name and request.source is None

    @property
    def keeps_answer(self) -> bool:
        """Return whether what it writes is kept for later prompts as well."""
        prefix = self.request.prefix
        is_one_text = not self.is_pinned and self.request.beams is None
        return self.shares and is_one_text and prefix is not None and prefix.keeps_answers

    @property
    def num_source(self) -> int:
        """Return the number of entries that its source takes; 0 without one."""
        return 0 if self.request.source is None else len(self.request.source)

    @property
    def num_new(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.tokens[len(self.request.tokens) :]

    def require_numbers(self, hidden: Tensor, row: int) -> None:
        """Refuse a first new token whose row of the residuals (T, D) holds infinities or what is no number.

        Greedy decoding would take some token from it. Later tokens are not looked at: damaged weights show at once.

        Raises:
            DecodingError: it does.
        """
        if self.num_new == 0 and not bool(hidden[row].isfinite().all()):
            raise DecodingError("the scores of the next token are not numbers; check the weights of the model")

    def take(self, block: Block) -> tuple[int, FinishReason | None]:
        """Add a block's tokens to the text. Return how many belong to it, and why no further one follows (or None)."""
        kept, reason = 0, None
        for token in block.tokens:
            self.tokens.append(token)
            kept += 1
            reason = self._finished()
            if reason is not None:
                break
        stats, now = self.stats, time.perf_counter()
        is_cut = kept < len(block.tokens)  # guesses behind the end of the text count for nothing
        guessed = [depth for depth in block.guessed if depth <= kept] if is_cut else block.guessed
        stats.count(len(guessed), kept - 1, max(guessed, default=0))
        if stats.num_tokens == 0:
            self.first_at = now
            stats.first_token_s = now - self.admitted_at
            stats.num_first_tokens = kept
        stats.num_tokens += kept
        stats.decode_s = now - self.first_at
        return kept, reason

    def judged(self, event: Emitted, hidden: Tensor) -> Emitted:
        """Have its guard judge a block; return what may be shown now. Where the text ends there, it is cut.

        Args:
            event: the block as it would be without a guard.
            hidden: (n, E) residuals that its tokens follow.
        """
        assert self.guarded is not None
        event = self.guarded.judged(event, hidden)
        if event.finish_reason == "content_filter":
            del self.tokens[len(self.request.tokens) + self.guarded.num_shown :]
            self.stats.num_tokens = self.num_new
        return event

    def _finished(self) -> FinishReason | None:
        if self.request.stop.stops_at(self.new_tokens):
            return "stop"
        return "length" if self.num_new >= self.request.max_new_tokens else None


@dataclass
class Block:
    """Tokens that one step yields for one sequence, before they are cut where the text ends; all lists are parallel."""

    rows: list[int]
    """Draft rows that the tokens follow."""
    tokens: list[int]
    guessed: list[int] = field(default_factory=list)
    """Depth of every guess that was drafted."""
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    guesses: list[tuple[int, ...]] | None = None

    def take_logprobs(self, logprobs: Tensor, num_top: int) -> None:
        """Read log p of the tokens, and of the ``num_top`` likeliest ones, from the rows they follow, (n, V)."""
        self.logprobs = logprobs.gather(1, torch.tensor(self.tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        if num_top:
            values, tokens = logprobs.topk(num_top)
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            self.top_logprobs = [tuple(zip(ids, logs, strict=True)) for ids, logs in pairs]

    def take_guesses(self, draft: Draft, children: list[list[int]]) -> None:
        """Read which tokens were drafted after each of the rows."""
        self.guesses = [tuple(draft.lists.tokens[child] for child in children[row]) for row in self.rows]

    def emitted(self, kept: int, sequence: Sequence, reason: FinishReason | None) -> Emitted:
        """Return the first ``kept`` tokens and their data as an event."""
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
    """Return the blocks of each slot, one for each verified step."""
    tokens, blocks = draft.lists.tokens, []
    for path, next_token, steps in zip(verdict.paths, verdict.next_tokens, verdict.steps, strict=True):
        path = path[len(path) - sum(step.kept for step in steps) :]
        following = [*(tokens[row] for row in path[1:]), next_token]
        stops = accumulate(step.kept for step in steps)
        spans = [(slice(stop - step.kept, stop), step) for stop, step in zip(stops, steps, strict=True)]
        blocks.append([Block(list(path[s]), following[s], list(step.guessed)) for s, step in spans])
    return blocks


def by_drafting(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Group sequences by the draft state they share."""
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(id(sequence.drafting), []).append(sequence)
    return list(groups.values())


def count_exits(passed: TargetPass, verdict: Verdict, sequences: list[Sequence], num_layers: int) -> None:
    """Record, for each sequence, the layers that its new tokens passed and the layer passes of all its rows, where
    these differ, and prompt tokens that came back.
    """
    for sequence in sequences if passed.came_back is not None else ():
        assert passed.came_back is not None
        sequence.stats.came_back.append(list(passed.came_back[sequence.slot]))
    if passed.depth is None:
        return
    assert passed.work is not None
    depth, work = passed.depth.tolist(), passed.work.tolist()
    for sequence, path, accepted in zip(sequences, verdict.paths, verdict.accepted, strict=True):
        last = path[len(path) - accepted - 1 :]
        sequence.stats.count_exits([depth[row] for row in last], num_layers, sum(work[row] for row in path))

"""The loop. Sequences are admitted, stepped and cancelled; everything above drives this one object.

A step is at most one prefill pass (prompt chunks of the sequences that still have some) and one target pass
per method for all live sequences together, whatever each of them drafted or accepted. The last prompt token
is never prefilled: it is the root of the first draft, so prompt logits are never computed and the first
token already profits from drafting. Prompt chunks start at fixed multiples of ``chunk``, and by their place go
up as chunks or row by row, so a prompt gives the same bits whatever else is running.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Drafter, DraftState, SlotState, TargetPass, Verdict
from vivace.decode.climb import Climb
from vivace.decode.laws import Laws
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.stats import DecodeStats
from vivace.decode.verify import children_of, verify_greedy, verify_sampled
from vivace.kernels.threads import one_pytorch_thread

Progress = Callable[[int, int], None]
"""Called with (prompt tokens done, prompt tokens in all) after every prefill pass."""


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
    generator: torch.Generator
    stats: DecodeStats
    admitted_at: float
    first_at: float = 0.0
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    """Prompt spans not yet prefilled."""

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


class Session:
    """Decodes any number of requests, ``num_slots`` at a time."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_slots: int,
        capacity: int,
        chunk: int = 256,
        prefill_budget: int = 1024,
        row_count: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            model: the decoder.
            num_slots: sequences that run at once; further ones wait.
            capacity: prompt and new tokens a sequence may have together.
            chunk: prompt tokens that go up together.
            prefill_budget: prompt rows in one pass at most (at least one chunk runs).
            row_count: decoding calls are padded to a multiple of this many rows (``Step.row_count``).
            progress: told about prefill.
        """
        self.model = model
        self.capacity = capacity
        self.chunk = chunk
        self.prefill_budget = prefill_budget
        self.progress = progress
        self.cache: KVCache = model.new_cache(num_slots, capacity + DRAFT_SLACK, row_count=row_count)
        self._drafting: dict[int, tuple[Drafter, DraftState]] = {}
        """By identity: drafters that requests have named, and what they remember of this session's sequences."""
        self.num_target_passes = 0
        """Decoding passes so far, whatever the number of slots in each."""
        self._climb = Climb()
        self._owned = [part.open(self.cache) for part in model.stateful]
        self._free = list(range(num_slots))[::-1]
        self._waiting: deque[tuple[int, Request]] = deque()
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self._prefilled = self._to_prefill = 0
        """Prompt tokens done and in all, since the last time every prompt was in."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._live and not self._waiting

    @property
    def reading(self) -> dict[int, tuple[int, int]]:
        """Of every request in a slot: prompt tokens that were known, and prompt tokens still to be read."""
        left = {s.id: sum(stop - first for first, stop in s.chunks) for s in self._live.values()}
        return {s.id: (s.stats.num_cached_tokens, left[s.id]) for s in self._live.values()}

    def admit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            CapacityError: it cannot fit a slot.
        """
        request.check_fits(self.capacity)
        self._waiting.append((self._next_id, request))
        self._next_id += 1
        return self._next_id - 1

    def cancel(self, request_id: int) -> None:
        """Stop a request now; its slot is free before the next step. Unknown or finished ids are ignored."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] != request_id)
        for sequence in list(self._live.values()):
            if sequence.id == request_id:
                self._release(sequence)

    def drain(self) -> Iterator[Emitted]:
        """Step until nothing is left; a caller who stops before that cancels the rest."""
        try:
            while not self.is_idle:
                yield from self.step()
        finally:
            self._waiting.clear()
            for sequence in list(self._live.values()):
                self._release(sequence)

    def drafting(self, drafter: Drafter) -> DraftState:
        """What a drafter remembers here; opened with the first request that names it, and kept for those to come."""
        if id(drafter) not in self._drafting:
            self._drafting[id(drafter)] = drafter, drafter.open(self.cache)
        return self._drafting[id(drafter)][1]

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Advance every sequence: prompt chunks for those that have some, tokens for the others."""
        self._fill_slots()
        filling = [s for s in self._live.values() if s.chunks]
        if filling:
            self._prefill(filling)
        emitted: list[Emitted] = []
        with self._threads():
            for drafting, sequences in _by_drafting([s for s in self._live.values() if not s.chunks]):
                emitted += self._decode(drafting, sequences)
        return emitted

    def _threads(self) -> AbstractContextManager[None]:
        """Whose threads work: PyTorch's stay out of the way of native layers."""
        return nullcontext() if self.model.backend.span is None else one_pytorch_thread()

    def _fill_slots(self) -> None:
        if self._prefilled == self._to_prefill:
            self._prefilled = self._to_prefill = 0
        while self._free and self._waiting:
            request_id, request = self._waiting.popleft()
            drafting = self.drafting(request.drafter)
            slot = self._free.pop()
            self.cache.prompts[slot] = len(request.tokens)
            generator = torch.Generator().manual_seed(request.seed)
            stats = DecodeStats(method=request.drafter.name, num_prompt_tokens=len(request.tokens))
            now = time.perf_counter()
            tokens = list(request.tokens)
            sequence = Sequence(request_id, request, slot, tokens, drafting, generator, stats, admitted_at=now)
            last = len(request.tokens) - 1
            known = request.prefix.attach(request.tokens[:last], slot, self.cache) if request.prefix else 0
            assert known == last or known % self.chunk == 0, "a known prefix ends where a chunk does"
            stats.num_cached_tokens = known
            sequence.chunks.extend((at, min(at + self.chunk, last)) for at in range(known, last, self.chunk))
            self._live[slot] = sequence
            self._to_prefill += last - known

    def _prefill(self, filling: list[Sequence]) -> None:
        """One pass over the next prompt chunks of one kind, as many as the budget allows."""
        started = time.perf_counter()
        batch: list[Sequence] = []
        rows, as_rows = 0, self._goes_as_rows(filling[0])
        for sequence in filling:
            first, stop = sequence.chunks[0]
            if self._goes_as_rows(sequence) != as_rows:
                continue
            if batch and rows + stop - first > self.prefill_budget:
                break
            batch.append(sequence)
            rows += stop - first
        spans = {s.slot: s.chunks.popleft() for s in batch}
        draft = Draft.given_only({s.slot: s.tokens[slice(*spans[s.slot])] for s in batch}, is_prompt=True)
        with self._threads() if as_rows else nullcontext():
            passed = self._climb.run(self.model, draft, self.cache, chunk=not as_rows)
        kept = {slot: range(stop - first) for slot, (first, stop) in spans.items()}
        groups = _by_drafting(batch)
        for drafting, own in groups:
            drafting.observe(*_part(draft, passed, [s.slot for s in own]), None)
        for state in (self.cache, *self._owned):
            state.commit(list(kept), list(kept.values()))
        for drafting, own in groups:
            drafting.commit([s.slot for s in own], [kept[s.slot] for s in own])
        elapsed = time.perf_counter() - started
        for sequence in batch:
            sequence.stats.prefill_s += elapsed
            if sequence.request.prefix and not sequence.chunks:
                sequence.request.prefix.keep(sequence.request.tokens[:-1], sequence.slot, self.cache)
        self._prefilled += rows
        if self.progress is not None:
            self.progress(self._prefilled, self._to_prefill)

    def _goes_as_rows(self, sequence: Sequence) -> bool:
        """Whether the next chunk of its prompt goes up row by row, as while decoding."""
        return sequence.chunks[0][1] <= self.model.backend.rows_up_to

    def _decode(self, drafting: DraftState, sequences: list[Sequence]) -> list[Emitted]:
        """Draft, verify, keep: one target pass for these sequences."""
        started = time.perf_counter()
        context = self._context(sequences)
        draft = drafting.propose(context)
        drafted = time.perf_counter()
        passed = drafting.traversal.run(self.model, draft, self.cache)
        if len(passed.rows) < len(draft.tokens):  # the others were pruned on the way
            draft = draft.only(passed.rows.tolist())
            passed = replace(passed, rows=torch.arange(len(draft.tokens)))
        verdict, logprobs = self._verify(draft, passed, context, sequences)
        self.num_target_passes += max((len(passes.kept) for passes in draft.passes), default=1)
        drafting.observe(draft, passed, verdict)
        if passed.depth is not None:
            _count_exits(passed, verdict, sequences, self.model.config.num_layers)
        emitted = self._keep(draft, verdict, logprobs, sequences)
        verified = time.perf_counter()
        if draft.passes:  # most of that was no drafting
            drafted = started + max(passes.draft_s for passes in draft.passes)
        for sequence in sequences:
            sequence.stats.draft_s += drafted - started
            sequence.stats.verify_s += verified - drafted
            sequence.stats.choice = drafting.reason
        return emitted

    def _context(self, sequences: list[Sequence]) -> Context:
        tokens = {s.slot: s.tokens for s in sequences}
        requests = {s.slot: s.request for s in sequences}
        room = {s.slot: s.request.max_new_tokens - s.num_new - 1 for s in sequences}
        return Context(
            slots=tuple(tokens),
            tokens=tokens,
            cache=self.cache,
            law=Laws(requests, tokens, self.cache.lengths),
            max_nodes={slot: min(tokens, DRAFT_SLACK - 1) for slot, tokens in room.items()},
            generators={s.slot: s.generator for s in sequences},
            room={s.slot: 0 if s.request.shows_guesses else room[s.slot] for s in sequences},
            ends=tuple(set[int]().union(*(s.request.stop.end_tokens for s in sequences))),
        )

    def _verify(
        self, draft: Draft, passed: TargetPass, context: Context, sequences: list[Sequence]
    ) -> tuple[Verdict, Tensor | None]:
        """The verdict, and log p of every vocabulary entry after each row when somebody asked for it."""
        wants_logprobs = any(s.request.logprobs for s in sequences)
        if context.law.is_greedy(context.slots) and not wants_logprobs:
            return verify_greedy(draft, self._choices(draft, passed.hidden)), None
        logits = self.model.head(passed.hidden, row_count=self.cache.row_count)
        logprobs = torch.log_softmax(logits, -1) if wants_logprobs else None
        if context.law.is_greedy(context.slots):
            return verify_greedy(draft, logits.argmax(-1).tolist()), logprobs
        law = context.law(logits, draft, passed.rows)
        return verify_sampled(draft, law, context.generators), logprobs

    def _choices(self, draft: Draft, hidden: Tensor) -> list[int]:
        """The most likely token after each row; where it is decided already nobody looks."""
        rows, count = draft.open_rows, self.cache.row_count
        if len(rows) == len(hidden):
            return self.model.greedy(hidden, row_count=count).tolist()
        choices = [-1] * len(hidden)
        for row, token in zip(rows, self.model.greedy(hidden[rows], row_count=count).tolist(), strict=True):
            choices[row] = token
        return choices

    def _keep(
        self, draft: Draft, verdict: Verdict, logprobs: Tensor | None, sequences: list[Sequence]
    ) -> list[Emitted]:
        """Commit the accepted paths and emit what each pass brought, cut at the first stop."""
        nodes = draft.lists.node
        for state in self._states(sequences):
            state.commit([s.slot for s in sequences], [[nodes[row] for row in path] for path in verdict.paths])
        children = children_of(draft) if any(s.request.shows_guesses for s in sequences) else []
        emitted = []
        for sequence, blocks in zip(sequences, _blocks(draft, verdict), strict=True):
            for block in blocks:
                if logprobs is not None and sequence.request.logprobs:
                    block.take_logprobs(logprobs[block.rows], sequence.request.num_top_logprobs)
                if sequence.request.shows_guesses:
                    block.take_guesses(draft, children)
            emitted += self._emit(sequence, blocks)
        return emitted

    def _emit(self, sequence: Sequence, blocks: list[Block]) -> list[Emitted]:
        """Hand out what the passes decided, up to where the text ends."""
        emitted: list[Emitted] = []
        for block in blocks:
            kept, reason = self._append(sequence, block)
            if reason is not None:
                if kept < len(block.tokens) or block is not blocks[-1]:  # forget what lies beyond the end of the text
                    for state in self._states([sequence]):
                        state.truncate([sequence.slot], [len(sequence.tokens) - 1])
                self._release(sequence)
            emitted.append(block.emitted(kept, sequence, reason))
            if reason is not None:
                break
        return emitted

    def _append(self, sequence: Sequence, block: Block) -> tuple[int, FinishReason | None]:
        """Add a block to a text; how many of its tokens belong there, and why there is no further one."""
        stats = sequence.stats
        kept, reason = 0, None
        for token in block.tokens:
            sequence.tokens.append(token)
            kept += 1
            reason = self._finished(sequence)
            if reason is not None:
                break
        stats.count(len(block.guessed), len(block.tokens) - 1, max(block.guessed, default=0))
        now = time.perf_counter()
        if stats.num_tokens == 0:
            sequence.first_at = now
            stats.first_token_s = now - sequence.admitted_at
            stats.num_first_tokens = kept
        stats.num_tokens += kept
        stats.decode_s = now - sequence.first_at
        return kept, reason

    def _finished(self, sequence: Sequence) -> FinishReason | None:
        if sequence.request.stop.stops_at(sequence.new_tokens):
            return "stop"
        return "length" if sequence.num_new >= sequence.request.max_new_tokens else None

    def _release(self, sequence: Sequence) -> None:
        self._to_prefill -= sum(stop - first for first, stop in sequence.chunks)
        for state in self._states([sequence]):
            state.release([sequence.slot])
        del self._live[sequence.slot]
        self._free.append(sequence.slot)

    def _states(self, sequences: list[Sequence]) -> list[SlotState]:
        drafting = {id(s.drafting): s.drafting for s in sequences}
        return [self.cache, *self._owned, *drafting.values()]


DRAFT_SLACK = 64
"""Entries a draft may use beyond a sequence's own limit."""


def _blocks(draft: Draft, verdict: Verdict) -> list[list[Block]]:
    """What each pass of each slot decided."""
    tokens, depths = draft.lists.tokens, dict[int, list[int]]()
    for slot, depth in zip(draft.lists.slot, draft.depths, strict=True):
        depths.setdefault(slot, []).append(depth)
    blocks = []
    for place, (slot, given) in enumerate(zip(draft.slots, draft.given, strict=True)):
        if draft.passes:
            path, (kept, guessed, _) = verdict.paths[place], draft.passes[place]
            made = [list(range(1, count + 1)) for count in guessed]
        else:
            path = verdict.paths[place][given - 1 :]
            kept, made = (len(path),), [depths[slot][given:]]
        following = [*(tokens[row] for row in path[1:]), verdict.next_tokens[place]]
        stops = list(accumulate(kept))
        spans = [slice(stop - count, stop) for stop, count in zip(stops, kept, strict=True)]
        blocks.append([Block(list(path[s]), following[s], guesses) for s, guesses in zip(spans, made, strict=True)])
    return blocks


def _by_drafting(sequences: list[Sequence]) -> list[tuple[DraftState, list[Sequence]]]:
    """Sequences that are drafted for together."""
    groups: dict[int, tuple[DraftState, list[Sequence]]] = {}
    for sequence in sequences:
        groups.setdefault(id(sequence.drafting), (sequence.drafting, []))[1].append(sequence)
    return list(groups.values())


def _count_exits(passed: TargetPass, verdict: Verdict, sequences: list[Sequence], num_layers: int) -> None:
    """Tell each sequence where the rows left that its new tokens follow, and the layer passes spent on all its rows."""
    assert passed.depth is not None
    assert passed.work is not None
    depth, work = passed.depth.tolist(), passed.work.tolist()
    for sequence, path, accepted in zip(sequences, verdict.paths, verdict.accepted, strict=True):
        last = path[len(path) - accepted - 1 :]
        sequence.stats.count_exits([depth[row] for row in last], num_layers, sum(work[row] for row in path))


def _part(draft: Draft, passed: TargetPass, slots: list[int]) -> tuple[Draft, TargetPass]:
    """Prompt chunks of some slots and what came out: a drafter hears of its own sequences only."""
    if len(slots) == len(draft.slots):
        return draft, passed
    tokens = {slot: draft.tokens[draft.slot == slot].tolist() for slot in slots}
    rows = torch.cat([(draft.slot == slot).nonzero()[:, 0] for slot in slots])
    return Draft.given_only(tokens, is_prompt=draft.is_prompt), TargetPass(passed.hidden[rows], torch.arange(len(rows)))

"""The loop. Sequences are admitted, stepped and cancelled; everything above drives this one object.

A step is at most one prefill pass (pieces of the prompts that are still to be read) and one proposal per method for all
live sequences together, whatever each of them drafted or accepted: a draft, which one target pass verifies, or steps
that are decided already (``multi_step.py``). The last prompt token is never prefilled: it is the root of the first
draft, so prompt logits are never computed and the first token already profits from drafting. How prompts are read is
up to their ``Prefill`` (``prefill.py``).

A request that fails ends alone (``isolation.py``): the step that it failed in is made again without it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import (
    Context,
    Decided,
    Draft,
    Drafter,
    DraftState,
    SlotState,
    TargetPass,
    Traversal,
    Verdict,
)
from vivace.decode.distributions import Distributions
from vivace.decode.forward import threads_of
from vivace.decode.isolation import STOPS, RequestFailed, SavedState, blaming, parts_of, told
from vivace.decode.memory import DRAFT_SLACK, MemoryBudget, text_bytes
from vivace.decode.prefix import CHUNK
from vivace.decode.prompt_reader import PromptReader, left_of
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.sequence import Block, Sequence, blocks_of, by_drafting, count_exits
from vivace.decode.stats import DecodeStats
from vivace.decode.verify import children_of, verify_greedy, verify_sampled
from vivace.errors import NoTokenError, VivaceError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (prompt tokens done, prompt tokens in all) after every prefill pass."""


class Session:
    """Decodes any number of requests, ``num_slots`` at a time."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_slots: int,
        capacity: int,
        chunk: int = CHUNK,
        prefill_budget: int = 1024,
        row_count: int = 1,
        steps_per_call: int | None = None,
        memory: MemoryBudget | None = None,
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
            steps_per_call: steps that one native call may make and verify; 0 verifies every draft here, None makes as
                many as fit into a twentieth of a second (``decode/multi_step.py``).
            memory: what texts are promised their keys and values from; None has no limit.
            progress: told about prefill.
        """
        self.model = model
        self.capacity = capacity
        self.chunk = chunk
        self.steps_per_call = steps_per_call
        self.memory = MemoryBudget() if memory is None else memory
        self.progress = progress
        self.cache: KVCache = model.new_cache(num_slots, capacity + DRAFT_SLACK, row_count=row_count)
        self._drafting: dict[int, tuple[Drafter, DraftState]] = {}
        """By identity: drafters that requests have named, and what they remember of this session's sequences."""
        self.num_target_passes = 0
        """Decoding passes so far, whatever the number of slots in each."""
        self._owned = [part.open(self.cache) for part in model.stateful]
        self._prompts = PromptReader(model, self.cache, self._owned, chunk=chunk, budget=prefill_budget)
        self._free = list(range(num_slots))[::-1]
        self._waiting: deque[tuple[int, Request]] = deque()
        self._live: dict[int, Sequence] = {}
        self._next_id = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._live and not self._waiting

    @property
    def reading(self) -> dict[int, tuple[int, int]]:
        """Of every request in a slot: prompt tokens that were known, and prompt tokens still to be read."""
        return {s.id: (s.stats.num_cached_tokens, left_of(s)) for s in self._live.values()}

    def text_bytes(self, request: Request) -> int:
        """Keys and values of a request at most."""
        return text_bytes(self.model, request.drafter, len(request.tokens) + request.max_new_tokens)

    def check(self, request: Request) -> None:
        """Refuse what could never be given a slot.

        Raises:
            CapacityError: it is longer than a slot, or its keys and values are larger than the memory for texts.
        """
        request.check_fits(self.capacity)
        self.memory.check_text(self.text_bytes(request), len(request.tokens) + request.max_new_tokens)

    def can_begin(self, request: Request) -> bool:
        """Whether a request that is admitted now is given a slot in the next step."""
        queued = [other for _, other in self._waiting]
        needed = sum(map(self.text_bytes, (*queued, request)))
        return len(self._free) > len(queued) and self.memory.has_room(needed)

    def admit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            CapacityError: it could never be given a slot.
        """
        self.check(request)
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
        """Step until nothing is left; a caller who stops before that cancels the rest.

        Raises:
            VivaceError: a request failed; the others are cancelled, and the session can be used again.
        """
        try:
            while not self.is_idle:
                for emitted in self.step():
                    if emitted.error is not None:
                        raise emitted.error
                    yield emitted
        finally:
            self.close()

    def close(self) -> None:
        """Cancel everything."""
        self._waiting.clear()
        for sequence in list(self._live.values()):
            self._release(sequence)

    def drafting(self, drafter: Drafter) -> DraftState:
        """What a drafter remembers here; kept from the first request that names it until none is left that does."""
        if id(drafter) not in self._drafting:
            self._drafting[id(drafter)] = drafter, drafter.open(self.cache)
        return self._drafting[id(drafter)][1]

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Advance every sequence: prompt chunks for those that have some, tokens for the others.

        A request that fails is over, and its last event carries the error; the others have what they would have had.
        """
        emitted = self._fill_slots()
        if filling := self._prompts.next(self._live.values()):
            emitted += self._apart(filling, self._prefill)
            if self.progress is not None:
                self.progress(self._prompts.num_read, self._prompts.num_asked)
        with threads_of(self.model):
            for sequences in by_drafting([s for s in self._live.values() if not s.pieces]):
                emitted += self._apart(sequences, self._decode)
        return emitted

    def _apart(self, sequences: list[Sequence], work: Callable[[list[Sequence]], list[Emitted]]) -> list[Emitted]:
        """Do a pass for sequences together; where it fails, again without whom it fails for, who end with the error.

        Args:
            sequences: in slots.
            work: one pass for some of them. It may fail only before it has told any state to forget something.
        """
        emitted: list[Emitted] = []
        parts = deque([sequences])
        while parts:
            part = parts.popleft()
            saved = SavedState.of(self._states(part), [s.generator for s in part if not s.request.takes_argmax])
            try:
                emitted += work(part)
            except STOPS:
                raise
            except RequestFailed as failure:
                saved.restore()
                others = [s for s in part if s.slot != failure.slot]
                emitted += [self._fail(s, failure.error) for s in part if s.slot == failure.slot]
                parts.extendleft([others] if others else [])
            except BaseException as cause:
                saved.restore()
                if len(part) == 1:
                    emitted.append(self._fail(part[0], told(cause, "a pass of its own")))
                    continue
                log.warning("a pass of %d sequences failed; it is tried again in parts", len(part), exc_info=cause)
                parts.extendleft(reversed(parts_of(part)))
        return emitted

    def _fail(self, sequence: Sequence, error: VivaceError) -> Emitted:
        """End a request that failed."""
        if isinstance(error, NoTokenError):
            error = sequence.request.without_a_token(sequence.num_new)
        self._release(sequence)
        return Emitted(sequence.id, (), None, "error", sequence.stats, error=error)

    def _fill_slots(self) -> list[Emitted]:
        """Give waiting requests the slots and the memory that are free; those that cannot begin are over."""
        failed: list[Emitted] = []
        while self._free and self._waiting:
            request_id, request = self._waiting[0]
            if self._live and not self.memory.has_room(self.text_bytes(request)):
                break  # those that run give back what they have
            self._waiting.popleft()
            slot = self._free[-1]
            stats = DecodeStats(method=request.drafter.name, num_prompt_tokens=len(request.tokens))
            try:
                with blaming(slot, "its drafter, which could not begin"):
                    sequence = self._seat(request_id, request, slot, stats)
            except RequestFailed as failure:
                failed.append(Emitted(request_id, (), None, "error", stats, error=failure.error))
                continue
            try:
                self._prompts.begin(sequence)
            except RequestFailed as failure:
                failed.append(self._fail(sequence, failure.error))
        return failed

    def _seat(self, request_id: int, request: Request, slot: int, stats: DecodeStats) -> Sequence:
        """Put a request into the slot that is free next."""
        drafting, prefilling = self.drafting(request.drafter), self._prompts.state_of(request.prefill)
        generator = torch.Generator().manual_seed(request.seed)
        now, tokens = time.perf_counter(), list(request.tokens)
        promise = self.memory.promise(self.text_bytes(request))  # last, as nothing fails after it
        sequence = Sequence(
            request_id, request, slot, tokens, drafting, prefilling, promise, generator, stats, admitted_at=now
        )
        self._free.remove(slot)
        self._live[slot] = sequence
        self.cache.prompts[slot] = len(request.tokens)
        self.cache.adapters.give(slot, request.adapter)
        return sequence

    def _prefill(self, batch: list[Sequence]) -> list[Emitted]:
        """One pass over the next pieces of these sequences' prompts."""
        return [self._fail(sequence, failure.error) for sequence, failure in self._prompts.read(batch)]

    def _decode(self, sequences: list[Sequence]) -> list[Emitted]:
        """One proposal for these sequences, which are drafted for together, verified here or decided already."""
        drafting = sequences[0].drafting
        started = time.perf_counter()
        context = self._context(sequences)
        proposed = drafting.propose(context)
        if isinstance(proposed, Decided):
            draft_s = proposed.draft_s
            checked = self._read_on(proposed, sequences)
        else:
            draft_s = time.perf_counter() - started
            checked = self._verify(proposed, drafting.traversal, context, sequences)
        draft, passed, verdict, logprobs = checked
        self.num_target_passes += max(map(len, verdict.steps))
        drafting.observe(draft, passed, verdict)
        blocks, nodes = blocks_of(draft, verdict), draft.lists.node
        for state in self._states(sequences):
            state.commit([s.slot for s in sequences], [[nodes[row] for row in path] for path in verdict.paths])
        if passed.depth is not None:
            count_exits(passed, verdict, sequences, self.model.config.num_layers)
        emitted = self._emit_all(draft, logprobs, sequences, blocks)
        elapsed = time.perf_counter() - started
        for sequence in sequences:
            sequence.num_passes += 1
            sequence.stats.draft_s += draft_s
            sequence.stats.verify_s += elapsed - draft_s
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
            distribution=Distributions(requests, tokens, self.cache.lengths),
            max_nodes={slot: min(tokens, DRAFT_SLACK - 1) for slot, tokens in room.items()},
            generators={s.slot: s.generator for s in sequences},
            room={s.slot: 0 if s.request.shows_guesses else room[s.slot] for s in sequences},
            steps_per_call=self.steps_per_call,
            ends=tuple(set[int]().union(*(s.request.stop.end_tokens for s in sequences))),
        )

    def _verify(self, draft: Draft, traversal: Traversal, context: Context, sequences: list[Sequence]) -> Checked:
        """Take a draft up the model in one pass, and keep what the model itself would have written."""
        passed = traversal.run(self.model, draft, self.cache)
        if len(passed.rows) < len(draft.tokens):  # the others were pruned on the way
            draft = draft.only(passed.rows.tolist())
            passed = replace(passed, rows=torch.arange(len(draft.tokens)))
        is_greedy = context.distribution.is_greedy(context.slots)
        wants_logprobs = any(s.request.logprobs for s in sequences)
        if is_greedy and not wants_logprobs:
            chosen = self.model.greedy(passed.hidden, row_count=self.cache.row_count).tolist()
            return Checked(draft, passed, verify_greedy(draft, chosen), None)
        logits = self.model.head(passed.hidden, row_count=self.cache.row_count)
        logprobs = torch.log_softmax(logits, -1) if wants_logprobs else None
        if is_greedy:
            return Checked(draft, passed, verify_greedy(draft, logits.argmax(-1).tolist()), logprobs)
        distribution = context.distribution(logits, draft, passed.rows)
        return Checked(draft, passed, verify_sampled(draft, distribution, context.generators), logprobs)

    def _read_on(self, decided: Decided, sequences: list[Sequence]) -> Checked:
        """Read the token behind the last row of steps that are verified already, and log p where it was asked for."""
        hidden, last = decided.passed.hidden, decided.draft.last_rows
        if any(s.request.logprobs for s in sequences):
            logits = self.model.head(hidden)
            verdict = decided.verdict(logits[last].argmax(-1).tolist())
            return Checked(decided.draft, decided.passed, verdict, torch.log_softmax(logits, -1))
        chosen = self.model.greedy(hidden[last])
        return Checked(decided.draft, decided.passed, decided.verdict(chosen.tolist()), None)

    def _emit_all(
        self, draft: Draft, logprobs: Tensor | None, sequences: list[Sequence], blocks: list[list[Block]]
    ) -> list[Emitted]:
        """Emit what each pass brought, cut at the first stop. What fails from here on is of one request alone."""
        children = children_of(draft) if any(s.request.shows_guesses for s in sequences) else []
        emitted: list[Emitted] = []
        for sequence, own in zip(sequences, blocks, strict=True):
            try:
                with blaming(sequence.slot, "its stop rule"):
                    for block in own:
                        if logprobs is not None and sequence.request.logprobs:
                            block.take_logprobs(logprobs[block.rows], sequence.request.num_top_logprobs)
                        if sequence.request.shows_guesses:
                            block.take_guesses(draft, children)
                    emitted += self._emit(sequence, own)
            except RequestFailed as failure:
                emitted.append(self._fail(sequence, failure.error))
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
        """Free a slot, whatever becomes of it."""
        self._prompts.forget(sequence)
        for state in self._states([sequence]):
            try:
                state.release([sequence.slot])
            except STOPS:
                raise
            except BaseException:  # whoever comes next opens another state of this drafter
                log.exception("slot %d could not be forgotten", sequence.slot)
                self._drafting = {key: pair for key, pair in self._drafting.items() if pair[1] is not state}
        sequence.promise.give_back()
        del self._live[sequence.slot]
        self._free.append(sequence.slot)
        named = {id(s.request.drafter) for s in self._live.values()} | {id(r.drafter) for _, r in self._waiting}
        self._drafting = {key: pair for key, pair in self._drafting.items() if key in named}

    def _states(self, sequences: list[Sequence]) -> list[SlotState]:
        opened = {id(state): state for s in sequences for state in (s.prefilling, s.drafting)}
        return [self.cache, *self._owned, *opened.values()]


class Checked(NamedTuple):
    """A proposal whose tokens are plain decoding's, whoever verified them."""

    draft: Draft
    passed: TargetPass
    """What came out at the top of its rows."""
    verdict: Verdict
    logprobs: Tensor | None
    """(T, V) log p of every vocabulary entry behind each row, where somebody asked for it."""

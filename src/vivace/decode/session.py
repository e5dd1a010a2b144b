"""The decoding loop: requests are admitted, advanced step by step, and cancelled here.

A step runs at most one prefill pass, over pieces of prompts that are still to be read. Then it asks each method for one
proposal for all its live sequences together. A proposal is a draft, which one target pass verifies, or steps that
native code has drafted and verified already (``multi_step.py``). The last prompt token is not prefilled: it is the root
of the first draft. So logits of the prompt are never computed, and already the first new token comes from a drafted
step. How prompts are read is up to the ``Prefill`` of each request (``prefill.py``).

A request that fails ends alone: the step in which it failed is run again without it (``isolation.py``).
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
from vivace.decode.isolation import STOPS, RequestFailed, SavedState, blaming, parts_of, request_error
from vivace.decode.memory import DRAFT_SLACK, MemoryBudget, text_bytes
from vivace.decode.prefix import CHUNK
from vivace.decode.prompt_reader import PromptReader, num_unread
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.sequence import Block, Sequence, blocks_of, by_drafting, count_exits
from vivace.decode.stats import DecodeStats
from vivace.decode.verify import children_of, verify_greedy, verify_sampled
from vivace.errors import NoTokenError, VivaceError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (prompt tokens read, prompt tokens in all) after every prefill pass."""


class Session:
    """Decodes any number of requests, ``num_slots`` at a time; further requests wait in a queue."""

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
        """Allocate the cache of keys and values.

        Args:
            model: the decoder.
            num_slots: number of sequences that run at once.
            capacity: largest number of prompt and new tokens of a sequence together.
            chunk: number of prompt tokens that pass the model together.
            prefill_budget: largest number of prompt rows in one pass; at least one chunk runs.
            row_count: decoding calls are padded to a multiple of this many rows (``Step.row_count``).
            steps_per_call: number of steps that one native call may draft and verify. 0 has this session verify every
                draft;
                None chooses as many as take a twentieth of a second (``decode/multi_step.py``).
            memory: limit for the keys and values of texts; None sets no limit.
            progress: called after every prefill pass.
        """
        self.model = model
        self.capacity = capacity
        self.chunk = chunk
        self.steps_per_call = steps_per_call
        self.memory = MemoryBudget() if memory is None else memory
        self.progress = progress
        self.cache: KVCache = model.new_cache(num_slots, capacity + DRAFT_SLACK, row_count=row_count)
        self._drafting: dict[int, tuple[Drafter, DraftState]] = {}
        """By identity of the drafter: each drafter that a request has named, and its state for the sequences of this
        session."""
        self.num_target_passes = 0
        """Number of decoding passes of the whole model so far; a pass over several slots counts once."""
        self._owned = [part.open(self.cache) for part in model.stateful]
        self._prompts = PromptReader(model, self.cache, self._owned, chunk=chunk, budget=prefill_budget)
        self._free = list(range(num_slots))[::-1]
        self._waiting: deque[tuple[int, Request]] = deque()
        self._live: dict[int, Sequence] = {}
        self._next_id = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no request runs and none waits."""
        return not self._live and not self._waiting

    @property
    def reading(self) -> dict[int, tuple[int, int]]:
        """Return, by request id, the prompt tokens taken from a prefix cache and those still to be read."""
        return {s.id: (s.stats.num_cached_tokens, num_unread(s)) for s in self._live.values()}

    def text_bytes(self, request: Request) -> int:
        """Return the largest number of bytes that keys and values of a request can take."""
        return text_bytes(self.model, request.drafter, len(request.tokens) + request.max_new_tokens)

    def check(self, request: Request) -> None:
        """Raise an error for a request that no free slot could ever take.

        Raises:
            CapacityError: it is longer than a slot, its keys and values need more than the memory for texts, or the
                model's rotary embedding changes before its end.
        """
        request.check_fits(self.capacity)
        request.check_rotation(self.model.config)
        self.memory.check_text(self.text_bytes(request), len(request.tokens) + request.max_new_tokens)

    def can_begin(self, request: Request) -> bool:
        """Return whether a request admitted now would be given a slot in the next step."""
        queued = [other for _, other in self._waiting]
        needed = sum(map(self.text_bytes, (*queued, request)))
        return len(self._free) > len(queued) and self.memory.has_room(needed)

    def admit(self, request: Request) -> int:
        """Put a request into the queue and return its id.

        Raises:
            CapacityError: no free slot could ever take it.
        """
        self.check(request)
        self._waiting.append((self._next_id, request))
        self._next_id += 1
        return self._next_id - 1

    def cancel(self, request_id: int) -> None:
        """Stop a request; its slot is free in the next step. Ids that are unknown or finished are ignored."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] != request_id)
        for sequence in list(self._live.values()):
            if sequence.id == request_id:
                self._release(sequence)

    def drain(self) -> Iterator[Emitted]:
        """Step until every request has finished, and yield what each step emits. Closing the iterator cancels the rest.

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
        """Cancel all requests."""
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
        """Advance every sequence: read a piece of the prompts that are incomplete, and decode the other sequences by
        one proposal.

        A request that fails ends, and its last event carries the error; the others continue with unchanged results.
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
        """Run a pass for ``sequences`` together. If it fails, end the sequences at fault and run it again for the
        others.

        Args:
            sequences: the sequences, all of them in slots.
            work: runs one pass for some of them. It may fail only before it has released or shortened any state.
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
                    emitted.append(self._fail(part[0], request_error(cause, "a pass of its own")))
                    continue
                log.warning("a pass of %d sequences failed; it is tried again in parts", len(part), exc_info=cause)
                parts.extendleft(reversed(parts_of(part)))
        return emitted

    def _fail(self, sequence: Sequence, error: VivaceError) -> Emitted:
        """End a request that failed and return its last event."""
        if isinstance(error, NoTokenError):
            error = sequence.request.without_a_token(sequence.num_new)
        self._release(sequence)
        return Emitted(sequence.id, (), None, "error", sequence.stats, error=error)

    def _fill_slots(self) -> list[Emitted]:
        """Give free slots and memory to waiting requests; return the last events of those that cannot begin."""
        failed: list[Emitted] = []
        while self._free and self._waiting:
            request_id, request = self._waiting[0]
            if self._live and not self.memory.has_room(self.text_bytes(request)):
                break  # running requests return their memory when they end
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
        promise = self.memory.promise(self.text_bytes(request))  # last, since nothing after it can fail
        sequence = Sequence(
            request_id, request, slot, tokens, drafting, prefilling, promise, generator, stats, admitted_at=now
        )
        self._free.remove(slot)
        self._live[slot] = sequence
        self.cache.prompts[slot] = len(request.tokens)
        self.cache.adapters.give(slot, request.adapter)
        return sequence

    def _prefill(self, batch: list[Sequence]) -> list[Emitted]:
        """Run one pass over the next pieces of these sequences' prompts; return the last events of those
        that failed.
        """
        return [self._fail(sequence, failure.error) for sequence, failure in self._prompts.read(batch)]

    def _decode(self, sequences: list[Sequence]) -> list[Emitted]:
        """Get one proposal for sequences of one method, verify it unless it is decided already, and emit what it
        yields.
        """
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
        """Run one target pass over a draft and keep the guesses that the model itself would have written."""
        passed = traversal.run(self.model, draft, self.cache)
        if len(passed.rows) < len(draft.tokens):  # the other rows were pruned during the pass
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
        """Choose the token after the last row of steps verified in native code; compute log p where a
        request wants it.
        """
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
        """Emit the tokens of a pass, each text cut at its first stop. From here on a failure concerns one
        request only.
        """
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
        """Emit the blocks of one sequence up to the end of its text, and free its slot there."""
        emitted: list[Emitted] = []
        for block in blocks:
            kept, reason = self._append(sequence, block)
            if reason is not None:
                if kept < len(block.tokens) or block is not blocks[-1]:  # drop what lies beyond the end of the text
                    for state in self._states([sequence]):
                        state.truncate([sequence.slot], [len(sequence.tokens) - 1])
                self._release(sequence)
            emitted.append(block.emitted(kept, sequence, reason))
            if reason is not None:
                break
        return emitted

    def _append(self, sequence: Sequence, block: Block) -> tuple[int, FinishReason | None]:
        """Add a block's tokens to a text. Return how many belong to it, and why no further one follows (or None)."""
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
        """Free a slot, even if one of its states fails to release it."""
        self._prompts.forget(sequence)
        for state in self._states([sequence]):
            try:
                state.release([sequence.slot])
            except STOPS:
                raise
            except BaseException:  # the next request of this drafter opens a new state
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
    """A proposal after verification: its kept tokens are those of plain decoding."""

    draft: Draft
    passed: TargetPass
    """Residuals of the draft's rows after the last layer."""
    verdict: Verdict
    logprobs: Tensor | None
    """(T, V) log p of every vocabulary entry after each row; None where no request wants it."""

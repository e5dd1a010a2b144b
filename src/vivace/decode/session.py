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

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Decided, Draft, Drafter, DraftState, SlotState
from vivace.decode.beam_pass import advance_all, candidates_of, search_of
from vivace.decode.checked import read_on, verified
from vivace.decode.context import context_of
from vivace.decode.forward import threads_of
from vivace.decode.interrupts import defer_interrupts
from vivace.decode.isolation import STOPS, RequestFailed, SavedState, blaming, parts_of, request_error
from vivace.decode.memory import DRAFT_SLACK, WIDEST_DRAFT, MemoryBudget
from vivace.decode.prefix import CHUNK
from vivace.decode.prompt_reader import PromptReader, num_unread
from vivace.decode.request import Emitted, Request
from vivace.decode.room import Give, Room, Waiting
from vivace.decode.sequence import Block, Sequence, blocks_of, by_drafting, count_exits
from vivace.decode.stats import DecodeStats
from vivace.decode.verify import children_of
from vivace.errors import BusyError, NoTokenError, UnsupportedError, VivaceError

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
            steps_per_call: steps that one native call may make and verify; 0 verifies every draft here, None makes as
                many as fit into a twentieth of a second (``decode/multi_step.py``).
            memory: what blocks of keys and values are taken from; None has no limit.
            progress: told about prefill.
        """
        self.model = model
        self.capacity = capacity
        self.chunk = chunk
        self.steps_per_call = steps_per_call
        self.memory = MemoryBudget() if memory is None else memory
        self.progress = progress
        self.cache: KVCache = model.new_cache(
            num_slots, capacity + WIDEST_DRAFT, row_count=row_count, account=self.memory
        )
        self.room = Room(model, self.cache, self.memory)
        """What requests need of memory."""
        self._drafting: dict[int, tuple[Drafter, DraftState]] = {}
        """Each drafter that a request has named, by its identity, and its state for the sequences of this session."""
        self.num_target_passes = 0
        """Number of decoding passes of the whole model so far; a pass over several slots counts once."""
        self._owned = [part.open(self.cache) for part in model.stateful]
        self._prompts = PromptReader(model, self.cache, self._owned, chunk=chunk, budget=prefill_budget)
        self._free = list(range(num_slots))[::-1]
        self.num_preemptions = 0
        """How often a request lost its slot when memory ended."""
        self._waiting: deque[Waiting] = deque()
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

    @property
    def num_free(self) -> int:
        """Return the number of slots that no request has."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without a slot, those included that have lost theirs."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise an error for a request that no free slot could ever take.

        Raises:
            CapacityError: it is longer than a slot, its keys and values need more than the memory for texts, or the
                model's rotary embedding changes before its end.
        """
        self.room.check(request, self.capacity)

    def can_begin(self, request: Request) -> bool:
        """Return whether a request admitted now would be given a slot in the next step."""
        asked = [*self._waiting, Waiting(self._next_id, request)]
        return len(self._free) >= len(asked) and self.room.has_for(asked, self._live.values())

    def admit(self, request: Request) -> int:
        """Put a request into the queue and return its id.

        Raises:
            CapacityError: no free slot could ever take it.
        """
        self.check(request)
        self._waiting.append(Waiting(self._next_id, request))
        self._next_id += 1
        return self._next_id - 1

    def fork(self, request_id: int, *, seed: int | None = None) -> int:
        """Begin another request with all that a running one has so far, its new tokens included; nothing is copied.

        Args:
            request_id: of a request that is in a slot and whose prompt is read.
            seed: of the new one's random numbers; None goes on with those of the other.

        Returns:
            The id of the new request, which has a slot of its own.

        Raises:
            BusyError: there is no free slot.
            UnsupportedError: a part of the model remembers texts and cannot be told.
        """
        source = next((s for s in self._live.values() if s.id == request_id), None)
        if source is None or source.pieces or source.search is not None:
            raise UnsupportedError(f"request {request_id} has beams, no slot, or a prompt to be read; fork it later")
        if self.model.stateful:
            raise UnsupportedError("a store of neurons, or a model on ranks, forks no text; ask for each by itself")
        if not self._free:
            raise BusyError(f"all {self.cache.num_slots} slots are in use; fork when a request has ended")
        slot = self._free.pop()
        target = source.forked(self._next_id, slot, seed)
        self._next_id += 1
        self._live[slot] = target
        self.cache.set_aside(slot, self.cache.lengths[source.slot] + target.request.max_new_tokens)
        for state in (self.cache, source.prefilling, source.drafting):
            state.fork([source.slot], [slot])
        self.cache.adapters.give(slot, target.request.adapter)
        return target.id

    def cancel(self, request_id: int) -> None:
        """Stop a request now; its slot is free before the next step. Unknown or finished ids are ignored."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting.id != request_id)
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
        """Return the state of a drafter, which is kept as long as a request of this session names the drafter."""
        if id(drafter) not in self._drafting:
            self._drafting[id(drafter)] = drafter, drafter.open(self.cache)
        return self._drafting[id(drafter)][1]

    @defer_interrupts
    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Advance every sequence: read a piece of the prompts that are incomplete, and decode the other sequences by
        one proposal.

        A request that fails ends, and its last event carries the error; the others continue with unchanged results.
        """
        emitted = self._fill_slots()
        while unread := self._prompts.without_source(self._live.values()):
            ready, failed = self._make_room({s: s.num_source for s in unread}, self.room.give_source)
            emitted += failed + self._apart(ready, self._read_sources)
        if filling := self._prompts.next(self._live.values()):
            ready, failed = self._make_room({s: s.pieces[0].stop for s in filling}, self.room.give)
            emitted += failed + self._apart(ready, self._prefill)
            if self.progress is not None:
                self.progress(self._prompts.num_read, self._prompts.num_asked)
        decoding = [s for s in self._live.values() if not s.pieces]
        stops = {s: len(s.tokens) - 1 + DRAFT_SLACK if s.search is None else s.search.stop for s in decoding}
        ready, failed = self._make_room(stops, self.room.give)
        emitted += failed
        with threads_of(self.model):
            for sequences in by_drafting([s for s in ready if s.search is None]):
                emitted += self._apart(sequences, self._decode)
            emitted += self._apart([s for s in ready if s.search is not None], self._search)
        return emitted

    def _make_room(self, stops: dict[Sequence, int], give: Give) -> tuple[list[Sequence], list[Emitted]]:
        """Give sequences the blocks that their next pass may write to, the oldest first; return those that can go on,
        in their order, and the last events of those that failed.

        Where memory ends the youngest gives back what it has and waits; one that is alone and finds none fails.

        Args:
            stops: of each sequence, one past the last entry that is written.
            give: gives them.
        """
        failed: list[Emitted] = []
        for sequence in sorted(stops, key=lambda s: s.id):
            while self._live.get(sequence.slot) is sequence:
                try:
                    give(sequence, stops[sequence])
                    break
                except RequestFailed as failure:
                    younger = [s for s in self._live.values() if s.id >= sequence.id and self.room.can_wait(s)]
                    if not isinstance(failure.error, BusyError) or not younger or len(self._live) == 1:
                        failed.append(self._fail(sequence, failure.error))
                    else:
                        self._preempt(max(younger, key=lambda s: s.id))
        return [s for s in stops if self._live.get(s.slot) is s], failed

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot away; it keeps its tokens, and is read again when there is room."""
        waiting = Waiting.again(sequence)
        self._release(sequence)
        sequence.pieces.clear()
        sequence.shown.clear()
        sequence.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(waiting)

    def _apart(self, sequences: list[Sequence], work: Callable[[list[Sequence]], list[Emitted]]) -> list[Emitted]:
        """Run a pass for ``sequences`` together. If it fails, end the sequences at fault and run it again for the
        others.

        Args:
            sequences: the sequences, all of them in slots.
            work: runs one pass for some of them. It may fail only before it has released or shortened any state.
        """
        emitted: list[Emitted] = []
        parts = deque([sequences] if sequences else [])
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
        """Give free slots and memory to waiting requests; return the last events of those that cannot begin, or may
        not.
        """
        failed: list[Emitted] = []
        while self._free and self._waiting:
            waiting, slot = self._waiting[0], self._free[-1]
            stats = waiting.stats
            if waiting.request.refused is not None:
                self._waiting.popleft()
                failed.append(waiting.refusal)
                continue
            try:
                with blaming(slot, "its drafter, which could not begin"):
                    if self._live and not self.room.has_for([waiting], self._live.values()):
                        break  # those that run give back what they have
                    sequence = self._seat(waiting, slot, stats)
            except RequestFailed as failure:
                self._waiting.popleft()
                failed.append(Emitted(waiting.id, (), None, "error", stats, error=failure.error))
                continue
            self._waiting.popleft()
            try:
                self._prompts.begin(sequence)
            except RequestFailed as failure:
                failed.append(self._fail(sequence, failure.error))
                continue
            stop = sequence.num_entries if sequence.is_pinned else len(sequence.tokens) + DRAFT_SLACK
            has_room, others = self._make_room({sequence: stop}, self.room.give)
            failed += others
            if not has_room:
                break
        return failed

    def _seat(self, waiting: Waiting, slot: int, stats: DecodeStats) -> Sequence:
        """Put a request into the slot that is free next, or one back that has lost its own."""
        request = waiting.request
        drafting, prefilling = self.drafting(request.drafter), self._prompts.state_of(request.prefill)
        self.cache.adapters.give(slot, request.adapter)
        if request.lead is not None:
            request.lead.attach(slot, self.cache)
        if waiting.paused is not None:
            sequence = waiting.paused
            sequence.slot, sequence.drafting, sequence.prefilling = slot, drafting, prefilling
        else:
            generator = torch.Generator().manual_seed(request.seed)
            now, tokens = time.perf_counter(), list(request.tokens)
            sequence = Sequence(
                waiting.id, request, slot, tokens, drafting, prefilling, generator, stats, admitted_at=now
            )
            sequence.is_pinned = self.room.is_pinned(request)
        self._free.remove(slot)
        sequence.search = search_of(request)
        self._live[slot] = sequence
        self.cache.set_aside(slot, sequence.num_entries)
        self.cache.prompts[slot] = len(request.tokens)
        return sequence

    def _read_sources(self, batch: list[Sequence]) -> list[Emitted]:
        """Read the sources of these sequences in one pass."""
        self._prompts.read_sources(batch)
        return []

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
        context = context_of(sequences, self.cache, self.steps_per_call)
        proposed = drafting.propose(context)
        if isinstance(proposed, Decided):
            draft_s = proposed.draft_s
            checked = read_on(self.model, proposed, context, sequences)
        else:
            draft_s = time.perf_counter() - started
            checked = verified(self.model, proposed, drafting.traversal, context, sequences)
        draft, passed, verdict, logprobs = checked
        self.num_target_passes += max(map(len, verdict.steps))
        drafting.observe(draft, passed, verdict)
        blocks, nodes = blocks_of(draft, verdict), draft.lists.node
        for state in self._states(sequences):
            state.commit([s.slot for s in sequences], [[nodes[row] for row in path] for path in verdict.paths])
        for sequence, path in zip(sequences, verdict.paths, strict=True):
            if sequence.keeps_answer:
                sequence.shown.append(passed.hidden[list(path)])
        count_exits(passed, verdict, sequences, self.model.config.num_layers)
        emitted = self._emit_all(draft, logprobs, passed.hidden, sequences, blocks)
        elapsed = time.perf_counter() - started
        for sequence in sequences:
            sequence.num_passes += 1
            sequence.stats.draft_s += draft_s
            sequence.stats.verify_s += elapsed - draft_s
            sequence.stats.choice = drafting.reason or sequence.stats.choice
        return emitted

    def _search(self, sequences: list[Sequence]) -> list[Emitted]:
        """Run the beams of these sequences in one pass, and emit what can no longer change."""
        started = time.perf_counter()
        candidates = candidates_of(self.model, self.cache, sequences)
        self.num_target_passes += 1
        begun = [s.slot for s in sequences if self.cache.lengths[s.slot] < len(s.request.tokens)]
        for state in self._states(sequences):
            state.commit(begun, [[0]] * len(begun))
        emitted: list[Emitted] = []
        for sequence, found in advance_all(sequences, candidates, time.perf_counter() - started):
            if isinstance(found, RequestFailed):
                emitted.append(self._fail(sequence, found.error))
            elif found is not None:
                emitted.append(found)
                if found.finish_reason is not None:
                    self._release(sequence)
        return emitted

    def _emit_all(
        self,
        draft: Draft,
        logprobs: Tensor | None,
        hidden: Tensor,
        sequences: list[Sequence],
        blocks: list[list[Block]],
    ) -> list[Emitted]:
        """Emit the tokens of a pass, whose rows have the residuals ``hidden``, each text cut at its first stop. From
        here on a failure concerns one request only.
        """
        children = children_of(draft) if any(s.request.shows_guesses for s in sequences) else []
        emitted: list[Emitted] = []
        for sequence, own in zip(sequences, blocks, strict=True):
            try:
                with blaming(sequence.slot, "its stop rule or its guard"):
                    sequence.require_numbers(hidden, own[0].rows[0])
                    for block in own:
                        if logprobs is not None and sequence.request.logprobs:
                            block.take_logprobs(logprobs[block.rows], sequence.request.num_top_logprobs)
                        if sequence.request.shows_guesses:
                            block.take_guesses(draft, children)
                    emitted += self._emit(sequence, own, hidden)
            except RequestFailed as failure:
                emitted.append(self._fail(sequence, failure.error))
        return emitted

    def _emit(self, sequence: Sequence, blocks: list[Block], hidden: Tensor) -> list[Emitted]:
        """Emit the blocks of one sequence up to the end of its text, and free its slot there."""
        emitted: list[Emitted] = []
        for block in blocks:
            kept, reason = sequence.take(block)
            event = block.emitted(kept, sequence, reason)
            if sequence.guarded is not None:
                event = sequence.judged(event, hidden[block.rows[:kept]])
                reason = event.finish_reason
            if reason is not None:
                if self.cache.lengths[sequence.slot] >= len(sequence.tokens):  # drop what is beyond the end
                    for state in self._states([sequence]):
                        state.truncate([sequence.slot], [len(sequence.tokens) - 1])
                if sequence.keeps_answer:
                    self._prompts.keep(sequence, self.cache.lengths[sequence.slot])
                self._release(sequence)
            if event.tokens or reason is not None:  # a guard may hold back all
                emitted.append(event)
            if reason is not None:
                break
        return emitted

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
        self.cache.adapters.give(sequence.slot, None)
        del self._live[sequence.slot]
        self._free.append(sequence.slot)
        requests = [s.request for s in self._live.values()] + [w.request for w in self._waiting]
        drafters = {id(r.drafter) for r in requests}
        self._drafting = {key: pair for key, pair in self._drafting.items() if key in drafters}
        self._prompts.keep_only({id(r.prefill) for r in requests})

    def _states(self, sequences: list[Sequence]) -> list[SlotState]:
        opened = {id(state): state for s in sequences for state in (s.prefilling, s.drafting)}
        return [self.cache, *self._owned, *opened.values()]

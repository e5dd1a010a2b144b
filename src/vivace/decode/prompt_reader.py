"""Reads the prompts of a session: chooses the pieces of each pass, informs drafters, and uses the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, SlotState, TargetPass
from vivace.decode.guarding import Withheld
from vivace.decode.isolation import RequestFailed, blaming
from vivace.decode.prefill import Prefill, PrefillState
from vivace.decode.sequence import Sequence as Decoding
from vivace.decode.sequence import by_drafting


class PromptReader:
    """Reads prompts piece by piece, each with the ``Prefill`` of its request."""

    def __init__(self, model: Decoder, cache: KVCache, owned: Sequence[SlotState], *, chunk: int, budget: int) -> None:
        """Create the reader of one session.

        Args:
            model: the decoder.
            cache: where entries go.
            owned: states of parts of the model that remember the session's sequences.
            chunk: number of prompt tokens of a piece.
            budget: largest number of rows in one pass; at least one piece runs. A piece of more rows passes so many
                layers at once as make the work of that many rows.
        """
        self.num_read = self.num_asked = 0
        """Number of prompt tokens read, and in all, since the reader was last without work."""
        self._model = model
        self._cache = cache
        self._owned = owned
        self._chunk = chunk
        self._budget = budget
        self._states: dict[int, tuple[Prefill, PrefillState]] = {}
        """By identity of the prefill: each one that a request has named, and its state."""

    def state_of(self, prefill: Prefill) -> PrefillState:
        """Return the session's state for a prefill, opened when a request first names it."""
        if id(prefill) not in self._states:
            spans = -(-self._chunk // self._budget)
            state = prefill.open(self._model, self._cache, chunk=self._chunk, spans=spans)
            self._states[id(prefill)] = prefill, state
        return self._states[id(prefill)][1]

    def keep_only(self, named: set[int]) -> None:
        """Forget the states of prefills that no request names any more; ``named`` are their identities."""
        self._states = {key: pair for key, pair in self._states.items() if key in named}

    def begin(self, sequence: Decoding) -> None:
        """Attach cached entries of a prompt and plan the pieces that remain to be read.

        Raises:
            RequestFailed: its prefix cache or its prefill failed.
        """
        if self.num_read == self.num_asked:
            self.num_read = self.num_asked = 0
        known = 0
        if sequence.request.guard is not None and not sequence.num_new:
            sequence.guarded = Withheld(sequence.request.guard.open())
        if sequence.shares:
            with blaming(sequence.slot, "its cached prompt"):
                known = self._attach(sequence)
        with blaming(sequence.slot, "the way its prompt is read"):
            prompt, reading = sequence.request.tokens, sequence.prefilling
            last = len(prompt) - 1
            sequence.pieces.extend(reading.plan(sequence.slot, prompt, min(known, last)))
            if sequence.num_new:  # it had a slot before
                sequence.pieces.extend(reading.plan_again(max(known, last), len(sequence.tokens) - 1))
        self.num_asked += num_unread(sequence)

    def forget(self, sequence: Decoding) -> None:
        """Drop a prompt that will not be read to its end from the progress counts."""
        self.num_asked -= num_unread(sequence)

    def without_source(self, sequences: Iterable[Decoding]) -> list[Decoding]:
        """Choose sequences whose sources are not read yet and share a pass, within the row budget."""
        if (sources := self._cache.beside) is None:
            return []
        batch: list[Decoding] = []
        rows = 0
        for sequence in sequences:
            source = sequence.request.source
            if source is None or sources.lengths[sequence.slot]:
                continue
            rows += len(source)
            if batch and rows > self._budget:
                break
            batch.append(sequence)
        return batch

    def read_sources(self, batch: Sequence[Decoding]) -> None:
        """Read the sources of these sequences in one pass."""
        started = time.perf_counter()
        sources = {s.slot: s.request.source for s in batch if s.request.source is not None}
        self._model.read_sources(sources, self._cache)
        for sequence in batch:
            sequence.stats.prefill_s += (time.perf_counter() - started) / len(batch)

    def next(self, sequences: Iterable[Decoding]) -> list[Decoding]:
        """Choose sequences whose next pieces share a pass: pieces of one kind and one prefill, within the
        row budget.
        """
        filling = [sequence for sequence in sequences if sequence.pieces]
        batch: list[Decoding] = []
        rows = 0
        for sequence in filling:
            piece, first = sequence.pieces[0], filling[0]
            if sequence.prefilling is not first.prefilling or piece.kind != first.pieces[0].kind:
                continue
            if batch and rows + piece.stop - piece.first > self._budget:
                break
            batch.append(sequence)
            rows += piece.stop - piece.first
        return batch

    def read(self, batch: Sequence[Decoding]) -> list[tuple[Decoding, RequestFailed]]:
        """Run the next pieces of these prompts in one pass; return the sequences that failed afterwards, with their
        errors.
        """
        started = time.perf_counter()
        prefilling = batch[0].prefilling
        done = prefilling.read({s.slot: s.pieces[0] for s in batch}, {s.slot: s.tokens for s in batch})
        for own in by_drafting([s for s in batch if s.slot in done.draft.slots]):
            own[0].drafting.observe(*_part(done.draft, done.passed, [s.slot for s in own]), None)
        kept = {slot: range(count) for slot, count in done.stored.items()}
        for state in (self._cache, *self._owned, prefilling):
            state.commit(list(kept), list(kept.values()))
        for own in by_drafting([s for s in batch if s.slot in kept]):
            own[0].drafting.commit([s.slot for s in own], [kept[s.slot] for s in own])
        failed: list[tuple[Decoding, RequestFailed]] = []
        elapsed = time.perf_counter() - started
        for sequence in batch:
            self.num_read += sequence.pieces.popleft().num_read
            sequence.num_passes += 1
            sequence.stats.prefill_s += elapsed
            sequence.stats.num_prompt_layer_passes += done.passes.get(sequence.slot, 0)
            sequence.stats.prompt_kept += [list(point) for point in done.kept.get(sequence.slot, ())]
            if sequence.guarded is not None and sequence.slot in done.draft.slots and not sequence.num_new:
                sequence.guarded.watch.read_prompt(_part(done.draft, done.passed, [sequence.slot])[1].hidden)
            if sequence.shares:
                if sequence.slot in done.draft.slots:
                    sequence.shown.append(_part(done.draft, done.passed, [sequence.slot])[1].hidden)
                try:
                    self._keep(sequence)
                except RequestFailed as failure:
                    failed.append((sequence, failure))
        return failed

    def _attach(self, sequence: Decoding) -> int:
        """Attach cached entries of a text, show them to its drafter as after prefill, and return how many they are."""
        request, slot, drafting = sequence.request, sequence.slot, sequence.drafting
        assert request.prefix is not None
        wanted = sequence.tokens[:-1] if sequence.keeps_answer else request.tokens[:-1]
        sequence.shown += request.prefix.attach(wanted, slot, self._cache)
        known = sum(map(len, sequence.shown))
        if not sequence.num_new:
            sequence.stats.num_cached_tokens = known
        if known:
            draft = Draft.committed_only({slot: wanted[:known]}, is_prompt=True, device=self._cache.device)
            shown = torch.cat(sequence.shown)
            drafting.observe(draft, TargetPass(shown, torch.arange(known)), None)
            if sequence.guarded is not None and not sequence.num_new:
                sequence.guarded.watch.read_prompt(shown)
            for state in (*self._owned, sequence.prefilling, drafting):
                state.commit([slot], [range(known)])
        if known == len(request.tokens) - 1 and not sequence.keeps_answer:  # the cache has the whole prompt already
            sequence.shown.clear()
        return known

    def _keep(self, sequence: Decoding) -> None:
        """Give the entries of a prompt that is completely stored to the prefix cache."""
        if sequence.pieces or sequence.num_new:
            return
        self.keep(sequence, len(sequence.request.tokens) - 1)
        if not sequence.keeps_answer:
            sequence.shown.clear()

    def keep(self, sequence: Decoding, length: int) -> None:
        """Give the entries of a text's first tokens to the prefix cache.

        Raises:
            RequestFailed: they could not be kept.
        """
        assert sequence.request.prefix is not None
        with blaming(sequence.slot, "keeping its text for others"):
            shown = torch.cat(sequence.shown)[:length]
            sequence.request.prefix.keep(sequence.tokens[:length], sequence.slot, self._cache, shown)


def num_unread(sequence: Decoding) -> int:
    """Return the number of prompt tokens that are still to be read."""
    return sum(piece.num_read for piece in sequence.pieces)


def _part(draft: Draft, passed: TargetPass, slots: list[int]) -> tuple[Draft, TargetPass]:
    """Return the rows of some slots and their residuals: a drafter observes its own sequences only."""
    if len(slots) == len(draft.slots):
        return draft, passed
    tokens = {slot: draft.tokens[draft.slot == slot].tolist() for slot in slots}
    rows = torch.cat([(draft.slot == slot).nonzero()[:, 0] for slot in slots])
    own = Draft.committed_only(tokens, is_prompt=draft.is_prompt, device=draft.device)
    return own, TargetPass(passed.hidden[rows], torch.arange(len(rows)))

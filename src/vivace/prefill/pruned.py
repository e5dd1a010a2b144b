"""Reading a prompt while tokens are pruned on the way up (LazyLLM, Fu et al. 2024, arXiv:2407.14057).

The layers are divided at the points of a schedule. All chunks of a prompt pass the layers below the first point; then
the last token passes them, and what it reads in the last of these layers says which tokens go on. Those pass the next
layers, and so on. So a pass has no more rows than a chunk, other requests decode between two of them, and below the
first point every entry has the bits of a full reading. Tokens keep their positions in the text, whatever is pruned.

In a layer, entries of the tokens that reached it lie one behind the other (``KVCache.prune``), so decoding reads fewer
entries there, without a gap and without a list of them, on all kernels. Every method drafts on top as usual.

Where tokens may come back (``returning.py``), the entries of a layer move to their positions in the text when the
prompt is read, and the residuals of what was pruned are kept where it was.

Where we differ from the paper:

* What is pruned does not come back while the answer is written unless that is asked for (``decode_keep``).
* The last token is scored by a row of its own. Where nothing comes back, the first decoding step computes it again, as
  it does after a full reading, so that drafts begin with it.
* A token that is pruned is shown to drafters with the residual that it had there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.seams import Draft, Drafter, TargetPass
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.decode.plain import NoMemory
from vivace.decode.prefill import PrefillPass, PrefillState, PromptPiece, layer_spans
from vivace.errors import UnsupportedError
from vivace.prefill.learned import LearnedScores
from vivace.prefill.passages import by_passages, divide, largest
from vivace.prefill.returning import ReturningDrafter, ReturningPass
from vivace.prefill.schedule import PrunePoint, Schedule
from vivace.prefill.scores import at_random, by_attention, by_words
from vivace.prefill.table import PrefillSpec


def check_model(model: Decoder, name: str) -> None:
    """Refuse a model whose prompts cannot be pruned.

    Raises:
        UnsupportedError: it has sliding windows or an encoder, rotates a prompt by its length, or remembers what it has
            read.
    """
    reason = None
    if any(model.config.window(layer) is not None for layer in range(model.config.num_layers)):
        reason = "it has layers with a sliding window, which count the entries between two tokens"
    elif any(rope.depends_on_length for rope in model.config.ropes):
        reason = "it rotates a prompt by its whole length"
    elif model.stateful:
        reason = "what it computes depends on every token that it has read"
    elif model.config.encoder is not None:
        reason = "it reads a source beside its prompt"
    elif model.config.num_layers < 2:
        reason = "it has one layer"
    if reason is not None:
        raise UnsupportedError(f"prefill {name} is not for this model: {reason}; use prefill full", field="prefill")


class PrunedPrefill:
    """Implements ``Prefill`` by a schedule; requests with the same one may share passes."""

    is_exact = False

    def __init__(
        self,
        spec: PrefillSpec,
        schedule: Schedule,
        decode_keep: Sequence[float] | None = None,
        *,
        width_bytes: int = 0,
        learned: LearnedScores | None = None,
        state: Callable[[PrunedPrefill, Decoder, KVCache, int], Pruning] | None = None,
    ) -> None:
        """Prune by ``schedule`` in the way of ``spec``.

        Args:
            spec: says which tokens go on.
            schedule: where tokens are pruned, and how many go on.
            decode_keep: shares that go on in every decoding step, point by point, while what was pruned may come back;
                None keeps what the prompt has kept.
            width_bytes: of a residual.
            learned: what points need that are not scored as the paper does.
            state: makes the state of a session; None is that of this file.
        """
        self._state = Pruning if state is None else state
        self.name = spec.name
        self.spec = spec
        self.learned = learned
        self.drafter: Drafter | None = None
        """The only one that may decode after such a prompt; None where any may."""
        if decode_keep is None:
            kept = [point for point in schedule.points if point.keep < 1 or point.entries is not None]
            self.schedule = replace(schedule, points=tuple(kept), reads_again=schedule.reads_again and bool(kept))
        else:
            self.schedule = schedule
            pairs = zip(schedule.points, decode_keep, strict=True)
            points = [PrunePoint(point.layer, keep) for point, keep in pairs]
            self.drafter = ReturningDrafter(width_bytes, ReturningPass(points))

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session."""
        state = self._state(self, model, cache, chunk)
        state.divide(spans)
        return state


@dataclass(frozen=True)
class _PartlyRead:
    """How far a prompt has been read."""

    prompt: tuple[int, ...]
    positions: Tensor
    """(n,) of the tokens that pass the present part of the layers; the last one is scored only."""
    hidden: Tensor | None
    """(n, E) residuals that enter it; None for embeddings."""
    top: Tensor
    """(tokens - 1, E) residual of each token at the last layer that it passed."""
    out: tuple[Tensor, ...] = ()
    """What left the present part so far, chunk by chunk."""
    midway: Tensor | None = None
    """Residuals of the present chunk where it has passed some layers of the part."""
    kept: tuple[tuple[int, int], ...] = ()
    parts: tuple[Tensor, ...] = ()
    """``positions`` of the parts below the present one."""


class Pruning(NoMemory):
    """Implements ``PrefillState``; ways of others override how tokens are chosen (``rivals/``)."""

    def __init__(self, prefill: PrunedPrefill, model: Decoder, cache: KVCache, chunk: int) -> None:
        """Read prompts of ``model`` into ``cache``, at most ``chunk`` rows of each at once."""
        self._model, self._cache, self._chunk = model, cache, chunk
        self._spec, self._schedule = prefill.spec, prefill.schedule
        self._comes_back, self._learned = prefill.drafter is not None, prefill.learned
        points = self._schedule.points
        self._begins_pruned = bool(points) and points[0].layer == 0
        spans = self._schedule.spans(model.config.num_layers)
        self._spans = spans[1:] if self._begins_pruned else spans
        self._readings: dict[int, _PartlyRead] = {}
        self.divide(1)

    def divide(self, spans: int) -> None:
        """Let chunks pass at most ``1 / spans`` of all layers in one piece."""
        num_layers = self._model.config.num_layers
        self._divided = [layer_spans(start, stop, num_layers, spans) for start, stop in self._spans]
        self._kinds = {
            _kind(part, start, by): (part, start, stop)
            for part, own in enumerate(self._divided)
            for start, stop in own
            for by in _BY
        }

    def _counts(self, length: int) -> tuple[int, ...]:
        counts = self._schedule.counts(length)
        return counts[1:] if self._begins_pruned else counts

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Return the chunks of every part of the layers, from the bottom up; nothing may be known."""
        assert known == 0, "pruned prompts share no entries"
        length = len(prompt)
        if length == 1:
            return []
        places, width = torch.arange(length), self._model.config.width
        kept: tuple[tuple[int, int], ...] = ()
        if self._begins_pruned:
            choose = at_random if self._spec.name == "random" else by_words
            places = choose(prompt, self._counts(length)[0])
            kept = ((0, len(places)),)
        dtype, device = self._model.dtype, self._model.device
        top = torch.zeros((length - 1, width), dtype=dtype, device=device)
        self._readings[slot] = _PartlyRead(tuple(prompt), places.to(device), None, top, kept=kept)
        counts, pieces = self._counts(length), list[PromptPiece]()
        for part, count in enumerate(counts):
            further = counts[part + 1] if part + 1 < len(counts) else 1
            firsts = list(range(0, count - 1, self._chunk)) or [0]
            for first in firsts:
                is_last = first == firsts[-1]
                stop = count if is_last else first + self._chunk
                by = "rows" if stop <= self._model.backend.rows_up_to else "chunks"
                num_read = 0
                if part == len(counts) - 1:
                    num_read = min(stop, count - 1) - first
                elif is_last:
                    num_read = count - further
                if part == 0 and first == 0:
                    num_read += length - counts[0]  # those that were pruned before
                own = [start for start, _ in self._divided[part]]
                pieces += [PromptPiece(first, stop, _kind(part, start, by), 0) for start in own[:-1]]
                pieces.append(PromptPiece(first, stop, _kind(part, own[-1], by), num_read))
        return pieces

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Never asked: a prompt that was pruned keeps its slot."""
        raise AssertionError("a pruned prompt cannot be read again")

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Run the next chunk of each slot through its part of the layers, and prune where it was the last."""
        kind = next(iter(pieces.values())).kind
        part, start, stop = self._kinds[kind]
        is_last = stop == self._spans[part][1]
        rows = {slot: range(piece.first, min(piece.stop, self._num_rows(slot))) for slot, piece in pieces.items()}
        passes = {slot: len(own) * (stop - start) for slot, own in rows.items()}
        is_chunk = kind.endswith("chunks")
        with nullcontext() if is_chunk else threads_of(self._model):
            for slot, out in self._run(rows, start, stop, chunk=is_chunk).items():
                reading = self._readings[slot]
                midway, all_out = (None, (*reading.out, out)) if is_last else (out, reading.out)
                self._readings[slot] = replace(reading, out=all_out, midway=midway)
        done = [slot for slot in pieces if is_last and rows[slot].stop == self._num_rows(slot)]
        finished = []
        for slot in done:
            self._end_part(slot)
            if part + 1 < len(self._spans):
                with threads_of(self._model):
                    self._prune(slot, part)
            else:
                finished.append(slot)
        prompts_read = {slot: self._readings[slot].prompt[:-1] for slot in finished}
        for slot in finished:
            self._finish(slot)
        tops = [self._readings[slot].top for slot in finished]
        hidden = torch.cat(tops) if tops else torch.empty((0, self._model.config.width), dtype=self._model.dtype)
        draft = Draft.committed_only(prompts_read, is_prompt=True, device=self._cache.device)
        passed = TargetPass(hidden, torch.arange(len(hidden)))
        stored = {slot: len(tokens) for slot, tokens in prompts_read.items()}
        kept = {slot: self._readings.pop(slot).kept for slot in finished}
        return PrefillPass(draft, passed, stored, passes, kept)

    def _num_rows(self, slot: int) -> int:
        """Return how many tokens of a prompt pass the present part, the last one not counted."""
        return len(self._readings[slot].positions) - 1

    def _run(self, rows: Mapping[int, range], start: int, stop: int, *, chunk: bool) -> dict[int, Tensor]:
        """Run rows of several prompts through layers start..stop-1 in one call; return what leaves them by slot."""
        slots = [slot for slot, own in rows.items() for _ in own]
        if not slots:
            return {slot: self._readings[slot].top[:0] for slot in rows}
        device = self._cache.device
        entries = torch.tensor([place for own in rows.values() for place in own], device=device)
        positions = torch.cat([self._readings[slot].positions[own.start : own.stop] for slot, own in rows.items()])
        step = Step.packed(self._cache, slots, positions, entries, chunk=chunk)
        midway = [self._readings[slot].midway for slot in rows]
        inputs = [
            self._inputs(slot, own, step) if half is None else half
            for (slot, own), half in zip(rows.items(), midway, strict=True)
        ]
        h = self._model.embed(torch.cat(inputs), step) if start == 0 else torch.cat(inputs)
        out = self._model.run(h, step, start, stop).split([len(own) for own in rows.values()])
        return dict(zip(rows, out, strict=True))

    def _inputs(self, slot: int, own: range, step: Step) -> Tensor:
        """Return the residuals of rows that enter the present part, or their tokens at the bottom."""
        reading = self._readings[slot]
        if reading.hidden is not None:
            return reading.hidden[own.start : own.stop]
        places = reading.positions[own.start : own.stop].tolist()
        return torch.tensor([reading.prompt[place] for place in places], dtype=torch.int64, device=step.device)

    def _end_part(self, slot: int) -> None:
        """Note with which residuals tokens left a part."""
        reading = self._readings[slot]
        out = torch.cat(reading.out)
        top = reading.top.clone()
        top[reading.positions[:-1]] = out
        self._readings[slot] = replace(reading, top=top, out=(out,))

    def _prune(self, slot: int, part: int) -> None:
        """Let the last token pass a part, and let those tokens go on that are chosen now."""
        reading, (_, stop) = self._readings[slot], self._spans[part]
        below, h = self._pass_last(slot, part)
        hidden = torch.cat((reading.out[0], h))
        count = self._counts(len(reading.prompt))[part + 1]
        kept = self._choose(slot, part, below, hidden).to(self._cache.device)
        assert len(kept) == count, "as many go on as was planned"
        self._readings[slot] = replace(
            reading,
            positions=reading.positions[kept],
            hidden=None if self._schedule.reads_again else hidden[kept],
            out=(),
            kept=(*reading.kept, (stop, count)),
            parts=(*reading.parts, reading.positions),
        )

    def _pass_last(self, slot: int, part: int) -> tuple[Tensor, Tensor]:
        """Let the last token pass a part; return its residual (1, E) in front of the last layer of it and behind."""
        step, h = self._entering(slot, part, range(self._num_rows(slot), self._num_rows(slot) + 1))
        start, stop = self._spans[part]
        below = self._model.run(h, step, start, stop - 1)
        return below, self._model.run(below, step, stop - 1, stop)

    def _entering(self, slot: int, part: int, own: range) -> tuple[Step, Tensor]:
        """Return the call of rows of one prompt, which are stored in their places, and the residuals that enter it."""
        places = torch.arange(own.start, own.stop, device=self._cache.device)
        step = Step.packed(self._cache, [slot] * len(own), self._readings[slot].positions[places], places)
        inputs = self._inputs(slot, own, step)
        return step, self._model.embed(inputs, step) if self._spans[part][0] == 0 else inputs

    def _choose(self, slot: int, part: int, below: Tensor, hidden: Tensor) -> Tensor:
        """Return which tokens go on behind a part, as places among those that passed it, in rising order.

        Args:
            slot: whose prompt it is.
            part: the part that was passed.
            below: (1, E) residual of the last token in front of the last of these layers.
            hidden: (n, E) residuals of all tokens behind it.
        """
        stop, count = self._spans[part][1], self._counts(len(self._readings[slot].prompt))[part + 1]
        score = self._schedule.points[part + self._begins_pruned].score
        if score == "paper":
            layer, last = self._model.layers[stop - 1], torch.tensor([len(hidden) - 1], device=self._cache.device)
            assert isinstance(layer, Layer)
            step = Step.packed(self._cache, [slot], self._readings[slot].positions[-1:], last)
            [weights] = layer.weigh(layer.query(below, step), step)
            return by_attention(weights, count)
        assert self._learned is not None, "asked for before"
        reading, config = self._readings[slot], self._learned.config
        tokens = [reading.prompt[place] for place in reading.positions.tolist()]
        lengths = divide(tokens, config.breaks, config.window, config.opening)
        if score == "taught":
            return by_passages(self._learned.maps[stop].scores(hidden, lengths), lengths, count)
        return by_passages(largest(self._read(slot, part), lengths), lengths, count)

    def _read(self, slot: int, part: int) -> Tensor:
        """Return with how much weight the window reads each token (n,) in the chosen heads of a part's last layer."""
        assert self._learned is not None
        start, stop = self._spans[part]
        count = len(self._readings[slot].positions)
        window = range(max(0, count - self._learned.config.window), count)
        step, h = self._entering(slot, part, window)
        step = step.without_writing()
        h = self._model.run(h, step, start, stop - 1)
        layer, masses = self._model.layers[stop - 1], torch.zeros(count, device=self._cache.device)
        assert isinstance(layer, Layer)
        for weights in layer.weigh(layer.query(h, step), step):
            masses[: weights.shape[1]] += weights[list(self._learned.heads(stop))].sum(0)
        return masses

    def _finish(self, slot: int) -> None:
        """Say which layers lack how many tokens, or lay out what they have so that the others can come back."""
        if self._comes_back:
            self._lay_out(slot)
            return
        self._cache.prune(slot, self._lacks(len(self._readings[slot].prompt)))

    def _lacks(self, length: int) -> list[int]:
        """Return how many tokens of a prompt each layer has no entries of."""
        lacks = [0] * self._model.config.num_layers
        for count, (start, stop) in zip(self._counts(length), self._spans, strict=True):
            lacks[start:stop] = [length - count] * (stop - start)
        return lacks

    def _lay_out(self, slot: int) -> None:
        """Move entries to their positions, and keep the residuals of what was pruned in front of the next layer."""
        reading, pending = self._readings[slot], self._cache.pending[slot]
        parts = (*reading.parts, reading.positions[:-1])
        for part, ((start, stop), positions) in enumerate(zip(self._spans, parts, strict=True)):
            for layer in range(start, stop) if part else ():
                self._cache.spread(slot, layer, positions)
            if part + 1 < len(parts):
                pruned = positions[
                    ~torch.isin(positions, reading.positions if part + 2 == len(parts) else parts[part + 1])
                ]
                pending.add(stop, pruned.cpu(), reading.top[pruned])
        assert reading.hidden is not None, "there is a point"
        pending.add(self._spans[-1][0], reading.positions[-1:].cpu(), reading.hidden[-1:])

    def release(self, slots: Sequence[int]) -> None:
        """Forget the prompts of these slots."""
        for slot in slots:
            self._readings.pop(slot, None)

    def saved(self) -> object:
        """Return how far every prompt has been read; a reading is replaced, never changed."""
        return dict(self._readings)

    def restore(self, saved: object) -> None:
        """Go back to ``saved``."""
        assert isinstance(saved, dict)
        self._readings = dict(saved)


_BY = ("rows", "chunks")


def _kind(part: int, start: int, by: str) -> str:
    """Return the kind of pieces that may share a pass: they pass the same layers, and attend in the same way."""
    return f"part {part} from layer {start} by {by}"

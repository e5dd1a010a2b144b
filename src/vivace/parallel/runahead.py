"""KV-Runahead: every rank reads a piece of the prompt, and entries run along a chain of ranks (Cho et al. 2024).

All ranks hold the whole model. Rank 1 reads the first piece, the next ranks those behind it, and rank 0, which decodes,
the last. In every layer a rank stores the keys and values of its own piece, receives those of all pieces in front of it
from the rank before it, sends both on, and only then attends. What is sent are the cache's own entries, read from where
they lie and received where they will lie; receiving goes on in a thread beside the computation.

Pieces begin at multiples of the chunk length of a session, and chunks attend as they do in one process. So the entries
that rank 0 ends with are those that one process writes, bit for bit.

**Where we differ from the paper:** no rank computes the attention of the last layer, since the last token of a prompt
is the first that is decoded; and layers with a sliding window send only what later pieces can see.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
from vivace.decode.prefill import FULL, PrefillPass, PrefillState, PromptPiece
from vivace.parallel import passes
from vivace.parallel.measuring import layer_costs, link_speed
from vivace.parallel.partition import Costs, balanced
from vivace.parallel.world import END, World

KIND = "runahead"


@dataclass(frozen=True)
class ChainPlace:
    """A rank's place in the chain of one prompt."""

    first: int
    """The rank reads tokens first..stop-1."""
    stop: int
    sender: int | None
    """From which rank the entries before them come; None at the beginning of the chain."""
    receiver: int | None
    """To which rank they go on; None at its end."""


def place_of(rank: int, counts: Sequence[int]) -> ChainPlace | None:
    """Return a rank's place where pieces of these lengths are read by ranks 1, 2, ... and the last one by rank 0.

    It is None for a rank that reads nothing.
    """
    number = len(counts) - 1 if rank == 0 else rank - 1
    if number >= len(counts) or (rank and number == len(counts) - 1):
        return None
    first = sum(counts[:number])
    is_last = number == len(counts) - 1
    receiver = None if is_last else (number + 2) % len(counts)
    return ChainPlace(first, first + counts[number], number if number else None, receiver)


class RunaheadPrefill:
    """Implements ``Prefill``: prompts of more than one chunk are read by several ranks at once."""

    name = "full"
    is_exact = False
    """Entries are those of a full prefill, but there are no residuals of the prompt for a prefix cache."""
    drafter: Drafter | None = None

    def __init__(self, world: World) -> None:
        """Read among the ranks of a world, of which this process is rank 0."""
        self.world = world
        self.costs: Costs | None = None
        """What was measured; None counts multiplications."""
        self._lock = threading.Lock()

    def open(self, model: Decoder, cache: KVCache, *, chunk: int) -> PrefillState:
        """Return the state of a session."""
        return _RunaheadState(self, model, cache, chunk)

    def counts(self, model: Decoder, length: int, chunk: int) -> list[int]:
        """Return the lengths of the pieces of a prompt, one for each rank that takes part."""
        num_ranks = min(self.world.size, -(-length // chunk))
        return balanced(length, num_ranks, chunk, self.costs or Costs.of(model.config))

    def measure(self, model: Decoder) -> None:
        """Measure the link and a layer, so that pieces are balanced for this machine."""
        link = link_speed(self.world)
        self.world.link = link
        self.costs = layer_costs(model, link)

    def read(
        self, model: Decoder, cache: KVCache, slot: int, tokens: Sequence[int], counts: Sequence[int], chunk: int
    ) -> None:
        """Fill a slot with the entries of tokens, with the help of the other ranks."""
        with self._lock:
            world = self.world
            try:
                world.tell(passes.packed(passes.READ, [cache.prompts[slot], chunk, len(counts), *counts, *tokens]))
                place = place_of(0, counts)
                assert place is not None
                run_piece(world, model, cache, slot, tokens, place, chunk)
            except BaseException as error:
                world.close(f"{type(error).__name__}: {error}")
                raise


class _RunaheadState(NoMemory):
    """Implements ``PrefillState``."""

    def __init__(self, prefill: RunaheadPrefill, model: Decoder, cache: KVCache, chunk: int) -> None:
        self._prefill = prefill
        self._model = model
        self._cache = cache
        self._chunk = chunk
        self._alone = FULL.open(model, cache, chunk=chunk)

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Return the whole prompt as one piece, or chunks of it where it has no more than one."""
        last = len(prompt) - 1
        if known or last <= self._chunk:
            return self._alone.plan(slot, prompt, known)
        return [PromptPiece(0, last, KIND, last)]

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Divide what a request had written; never asked for, as such requests keep their slots."""
        return self._alone.plan_again(first, stop)

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Read whole prompts one after the other with all ranks, or chunks on this rank alone."""
        if next(iter(pieces.values())).kind != KIND:
            return self._alone.read(pieces, prompts)
        model, chunk = self._model, self._chunk
        num_layers, work = model.config.num_layers, {}
        for slot, piece in pieces.items():
            counts = self._prefill.counts(model, piece.stop, chunk)
            self._prefill.read(model, self._cache, slot, prompts[slot][: piece.stop], counts, chunk)
            work[slot] = num_layers * piece.stop
        nobody = torch.empty(0, model.config.width, dtype=model.dtype, device=model.device)
        shown = TargetPass(nobody, torch.arange(0))
        stored = {slot: piece.stop for slot, piece in pieces.items()}
        return PrefillPass(Draft.committed_only({}, is_prompt=True, device=model.device), shown, stored, work)


class RunaheadFollower:
    """Reads pieces of prompts until rank 0 has ended."""

    def __init__(self, world: World, decoder: Decoder) -> None:
        """Follow rank 0 with the whole model."""
        self._world = world
        self._decoder = decoder

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until rank 0 has ended.

        Raises:
            WorldError: a rank is gone, hangs or has given up.
        """
        while (message := self._world.links.message(0, is_idle=True)) != END:
            operation, numbers, _ = passes.unpacked(message)
            if operation == passes.ECHO:
                echo = torch.zeros(numbers[0], dtype=torch.uint8)
                self._world.links.send(0, 0, echo, purpose="measuring")
                continue
            if operation != passes.READ:
                self._world.links.fail(
                    f"rank 0 sent operation {operation} to rank {self._world.rank}, which only reads"
                )
            length, chunk, num_pieces, *rest = numbers
            counts, tokens = rest[:num_pieces], rest[num_pieces:]
            place = place_of(self._world.rank, counts)
            if place is not None:
                cache = self._decoder.new_cache(1, place.stop)
                cache.set_aside(0, place.stop)
                cache.extend([0], [place.stop])
                cache.prompts[0] = length
                run_piece(self._world, self._decoder, cache, 0, tokens, place, chunk)
                self._world.links.flush()


def run_piece(
    world: World, decoder: Decoder, cache: KVCache, slot: int, tokens: Sequence[int], place: ChainPlace, chunk: int
) -> None:
    """Compute one rank's piece of a prompt, and leave in its slot the entries of all tokens up to its end.

    Args:
        world: the ranks.
        decoder: the whole model.
        cache: has blocks for the slot's tokens up to the end of the piece, none of which is committed.
        slot: whose entries they are.
        tokens: of the prompt, at least up to the end of the piece.
        place: of this rank in the chain.
        chunk: tokens that attend together; pieces begin at multiples of it.
    """
    first, stop = place.first, place.stop
    is_chunk = stop > decoder.backend.rows_up_to
    step = Step.at(cache, [slot] * (stop - first), list(range(first, stop)))
    chunks = tuple((slot, at - first, min(at + chunk, stop) - first) for at in range(first, stop, chunk))
    step = replace(step, is_prompt=True, chunk=chunks if is_chunk else None)
    own = torch.tensor(tokens[first:stop], dtype=torch.int64, device=decoder.device)
    layers: list[Layer] = list(decoder.layers)  # type: ignore[arg-type]
    with nullcontext() if is_chunk else threads_of(decoder):
        arriving = None if place.sender is None else _Arriving(world, cache, slot, place.sender, first)
        h = decoder.embed(own, step)
        for layer in layers:
            q = layer.project(h, step)
            if arriving is not None:
                arriving.wait(layer.index)
            if place.receiver is not None:
                sent = entries_of(cache, layer.index, slot, seen_from(decoder, layer.index, stop), stop)
                world.links.send(place.receiver, layer.index, *sent, purpose="entries")
            if layer is layers[-1]:
                break
            h = layer.feed(layer.output(h, layer.read(q, step), step), step)


def seen_from(decoder: Decoder, layer: int, stop: int) -> int:
    """Return the first entry of a layer that a row at position ``stop`` can see."""
    window = decoder.config.window(layer)
    return 0 if window is None else max(0, stop - window + 1)


class _Arriving:
    """Receives the entries in front of a piece, layer by layer, in a thread of its own."""

    def __init__(self, world: World, cache: KVCache, slot: int, sender: int, stop: int) -> None:
        self._arrived = threading.Condition()
        self._num_layers = 0
        self._error: BaseException | None = None
        config = cache.store.specs

        def receive() -> None:
            try:
                for layer, spec in enumerate(config):
                    start = 0 if spec.window is None else max(0, stop - spec.window + 1)
                    world.links.receive(sender, layer, *entries_of(cache, layer, slot, start, stop))
                    with self._arrived:
                        self._num_layers = layer + 1
                        self._arrived.notify()
            except BaseException as error:  # noqa: BLE001 - raised where the entries are waited for
                with self._arrived:
                    self._error = error
                    self._arrived.notify()

        threading.Thread(target=receive, name="vivace-entries", daemon=True).start()

    def wait(self, layer: int) -> None:
        """Wait until a layer's entries are there."""
        with self._arrived:
            while self._num_layers <= layer:
                if self._error is not None:
                    raise self._error
                self._arrived.wait()


def entries_of(cache: KVCache, layer: int, slot: int, start: int, stop: int) -> list[Tensor]:
    """Return the memory of entries start..stop-1 of a slot: views of neighbouring entries of one head each."""
    pool, size = cache.store.place_of_layer[layer][0], cache.store.size
    blocks = cache.tables[pool].blocks[slot]
    runs: list[list[int]] = []
    for place in range(start // size, -(-stop // size)):
        begin = blocks[place] * size + max(0, start - place * size)
        end = blocks[place] * size + min(size, stop - place * size)
        if runs and runs[-1][1] == begin:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    return [head[begin:end] for part in cache.store.stored(layer) for head in part for begin, end in runs]

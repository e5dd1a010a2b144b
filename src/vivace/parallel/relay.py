"""A prompt that ranks read in stages although each of them holds the whole model: entries end at rank 0, which decodes.

Every rank computes its stage of the layers for all chunks, one chunk after the other, as in a pipeline, and begins with
tokens that it knows or with the rows of the stage before it. Behind the rows of a chunk it sends the keys and values of
its layers to rank 0, which receives them in a thread beside its own stage, the last one. So rank 0 ends with what one
process writes, bit for bit, and decodes alone. Over a slow link that is as much as a chain of pieces sends; where one
rank computes longer than that takes, it is hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.decode.forward import threads_of
from vivace.parallel.exchange import Range, entries_of
from vivace.parallel.pipeline import PURPOSE, stage_of
from vivace.parallel.world import World


def run_stage(world: World, decoder: Decoder, cache: KVCache, slot: int, tokens: Sequence[int], chunk: int) -> None:
    """Compute this rank's stage of a prompt; rank 0 ends with the entries of all layers.

    Args:
        world: the ranks.
        decoder: the whole model.
        cache: has blocks for the slot's tokens, none of them committed.
        slot: whose entries they are.
        tokens: of the prompt.
        chunk: tokens that attend together.
    """
    bounds = [(first, min(first + chunk, len(tokens))) for first in range(0, len(tokens), chunk)]
    arriving = _ArrivingStages(world, decoder, cache, slot, bounds) if world.leads else None
    first, stop = stage_of(world.rank, world.size, decoder.config.num_layers)
    for number, piece in enumerate(bounds):
        is_chunk = piece[1] > decoder.backend.rows_up_to
        step = Step.at(cache, [slot] * (piece[1] - piece[0]), list(range(*piece)))
        step = replace(step, is_prompt=True, chunk=((slot, 0, piece[1] - piece[0]),) if is_chunk else None)
        if arriving is not None:
            h = arriving.rows()
        elif world.rank == 1:
            h = decoder.embed(torch.tensor(tokens[slice(*piece)], dtype=torch.int64, device=decoder.device), step)
        else:
            h = _rows(decoder, piece)
            world.links.receive(world.rank - 1, number, h)
        with nullcontext() if is_chunk else threads_of(decoder):
            h = run_layers(decoder, h, step, first, stop)
        if arriving is None:
            world.links.send((world.rank + 1) % world.size, number, h.contiguous(), purpose=PURPOSE)
            for layer in range(first, stop):
                world.links.send(0, layer, *entries_of(cache, layer, slot, *piece), purpose="entries")
    if arriving is not None:
        arriving.wait()


def run_layers(decoder: Decoder, h: Tensor, step: Step, first: int, stop: int) -> Tensor:
    """Run rows through layers first..stop-1; of the model's last layer only keys and values are computed."""
    last = decoder.config.num_layers - 1
    if first < min(stop, last):
        h = decoder.run(h, step, first, min(stop, last))
    if stop > last:
        layer = decoder.layers[last]
        assert isinstance(layer, Layer)
        layer.project(h, step)
    return h


def _rows(decoder: Decoder, piece: Range) -> Tensor:
    return torch.empty(piece[1] - piece[0], decoder.config.width, dtype=decoder.dtype)


class _ArrivingStages:
    """Receives on rank 0 the rows of the stage before it and the entries of all stages, a thread for each rank."""

    def __init__(self, world: World, decoder: Decoder, cache: KVCache, slot: int, bounds: Sequence[Range]) -> None:
        self._ready: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        self._errors: list[BaseException] = []

        def receive(rank: int) -> None:
            try:
                for number, piece in enumerate(bounds):
                    if rank == world.size - 1:
                        rows = _rows(decoder, piece)
                        world.links.receive(rank, number, rows)
                        self._ready.put(rows)
                    for layer in range(*stage_of(rank, world.size, decoder.config.num_layers)):
                        world.links.receive(rank, layer, *entries_of(cache, layer, slot, *piece))
            except BaseException as error:  # noqa: BLE001 - raised where rows or entries are waited for
                self._errors.append(error)
                self._ready.put(error)

        self._threads = [
            threading.Thread(target=receive, args=(rank,), name=f"vivace-stage-{rank}", daemon=True)
            for rank in world.others
        ]
        for thread in self._threads:
            thread.start()

    def rows(self) -> Tensor:
        """Wait for the rows of the next chunk."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def wait(self) -> None:
        """Wait for the entries of all chunks."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

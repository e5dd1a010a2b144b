"""Whole layers that are read block by block, of which one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.storage.neurons.test_neurons import WIDTH, checkpoint
from vivace.errors import CheckpointError
from vivace.storage.convert import write_store
from vivace.storage.io.readers import BufferedReader
from vivace.storage.io.thread_reader import ThreadAsyncReader
from vivace.storage.neurons.loader import NeuronLoader
from vivace.storage.store import Store


def test_a_block_that_fails_leaves_no_read_behind(tmp_path: Path) -> None:
    """The next pass fills the same buffers: nothing of the one that failed may still arrive there."""
    folder = checkpoint("llama", tmp_path / "model", intermediate_size=WIDTH)
    store = write_store(folder, tmp_path / "store", layout="selected", kernels="torch")

    class Failing(BufferedReader):
        is_broken = True

        def read(self, offset: int, into: memoryview) -> None:
            bundle = store["layers.0.neurons"]
            place = (offset - bundle.offset) // (loader.block * bundle.stride)
            if self.is_broken and place == 1:
                raise CheckpointError("the device failed")
            super().read(offset, into)

    device = Failing(store.path)
    reader = ThreadAsyncReader(device, num_threads=4)
    loader = NeuronLoader(store, reader, 8, thresholds=[], predictors=[], window=1)
    loader.block = 128  # several of them, which fit into the buffers
    with pytest.raises(CheckpointError, match="the device failed"):
        list(loader.every(0))
    assert not reader._reads
    device.is_broken = False
    blocks = loader.every(0)
    next(blocks)
    blocks.close()  # the pass ended for another reason
    assert not reader._reads
    found = torch.cat([parts["up"].clone() for _, parts in loader.every(0)])
    wanted = store.records("layers.0.neurons", memory_of(store))["up"]
    assert torch.equal(found, wanted)


def memory_of(store: Store) -> torch.Tensor:
    bundle = store["layers.0.neurons"]
    raw = store.path.read_bytes()[bundle.offset : bundle.offset + bundle.num_bytes]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, bundle.stride)[: bundle.count]

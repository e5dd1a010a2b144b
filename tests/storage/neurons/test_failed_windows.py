"""Neurons that come damaged, or of which the wait is interrupted: nothing of them is left in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.storage.neurons.test_neurons import WIDTH, checkpoint
from vivace.core.seams import Memory
from vivace.errors import CheckpointError
from vivace.storage.convert import write_store
from vivace.storage.io.async_reader import PendingRead
from vivace.storage.io.readers import BufferedReader
from vivace.storage.io.thread_reader import ThreadAsyncReader
from vivace.storage.neurons.loader import NeuronLoader
from vivace.storage.neurons.predictors import Predictor


class Damaged(BufferedReader):
    """Fills with bytes that are no numbers, and then says that they are wrong, once it is broken."""

    is_broken = False

    def read(self, offset: int, into: memoryview) -> None:
        super().read(offset, into)
        if self.is_broken:
            into[:] = b"\xff" * len(into)
            raise CheckpointError("a page is damaged")


class Text(Memory):
    """The memory of a session."""


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt])
@pytest.mark.parametrize("what", ["brought back", "brought"])
def test_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], what: str
) -> None:
    folder = checkpoint("llama", tmp_path / "model", intermediate_size=WIDTH, hidden_act="relu")
    store = write_store(folder, tmp_path / "store", layout="neurons", dtype="float32")
    device = Damaged(store.path)
    reader = ThreadAsyncReader(device, num_threads=2)
    predictors = [Predictor(torch.zeros(1, 32), torch.zeros(WIDTH, 1), torch.ones(WIDTH)) for _ in "abc"]
    loader = NeuronLoader(store, reader, 8, thresholds=[], predictors=predictors, window=1)
    first, second = Text(), Text()
    loader.take(first)
    for layer in range(3):
        list(loader.bring(layer, torch.arange(4)))
    loader.take(second)
    calls: dict[str, Callable[[], object]] = {
        "brought back": lambda: loader.take(first),
        "brought": lambda: [list(loader.bring(layer, torch.arange(4))) for layer in range(3)],
    }

    def interrupted(_: PendingRead) -> None:
        raise KeyboardInterrupt

    device.is_broken = True
    if error is KeyboardInterrupt:
        monkeypatch.setattr(PendingRead, "wait", interrupted)
    with pytest.raises(error):
        calls[what]()
    assert not reader._reads
    for cache in loader.caches:
        assert cache.num_used == 0
        assert cache.rows.view(torch.float32).isfinite().all()
    reader.close()
    device.close()

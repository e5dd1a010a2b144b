"""A model whose storage was closed says so at once: it neither waits for ever nor answers with what is left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.errors import CheckpointError, VivaceError
from vivace.storage.convert import write_store
from vivace.storage.io import native_reader
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.readers import PAGE, READERS, aligned


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("closed")
    dense = make_checkpoint(folder / "dense", layers=4)
    mixture = upcycle_checkpoint(dense, folder / "mixture", num_experts=8, noise=0.5)
    return {
        "experts": write_store(mixture, folder / "experts").folder,
        "layers": write_store(dense, folder / "layers").folder,
        "neurons": write_store(dense, folder / "selected", layout="selected").folder,
    }


@pytest.fixture(params=["native", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads":
        monkeypatch.setattr(native_reader, "found_library", lambda: None)
    elif native_reader.found_library() is None:
        pytest.skip("the native reader is not built")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["experts", "layers", "neurons"])
def test_a_closed_model_says_so(stores: dict[str, Path], kind: str) -> None:
    whole = vivace.load(stores[kind], memory="100MiB", reader="buffered").storage
    assert whole is not None
    engine = vivace.load(stores[kind], memory=int(0.85 * whole.plan.num_bytes), reader="buffered")
    engine.generate("aka", method="plain", max_new_tokens=8)
    assert engine.storage is not None
    before = engine.storage.async_reader.traffic.num_bytes
    engine.storage.close()
    assert engine.storage.facts["bytes_read"]
    assert engine.storage.async_reader.traffic.num_bytes >= before
    errors: list[VivaceError] = []

    def ask() -> None:
        for _ in range(2):
            try:
                engine.generate("another text", method="plain", max_new_tokens=8)
            except VivaceError as exc:
                errors.append(exc)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "it waits for what nobody reads"
    assert ["is closed" in str(error) for error in errors] == [True, True], errors


@pytest.mark.usefixtures("threads")
def test_a_closed_reader_says_so(path: Path) -> None:
    reader = open_async_reader(READERS["buffered"](path), num_threads=1, chunk_bytes=PAGE)
    done = reader.submit_whole(aligned(PAGE), 0)
    done.wait()
    reader.close()
    reader.close()
    assert done.join() is None
    assert reader.traffic.num_bytes == PAGE
    with pytest.raises(CheckpointError, match="is closed"):
        reader.submit_whole(aligned(PAGE), 0)
    with pytest.raises(CheckpointError, match="is closed"):
        reader.completed(waits=True)
    with pytest.raises(CheckpointError, match="is closed"):
        reader.reschedule(done, 1)


@pytest.mark.usefixtures("threads")
def test_a_read_that_was_given_up_has_failed(path: Path) -> None:
    gone = READERS["buffered"](path)
    for _ in range(20):
        reader = open_async_reader(gone, num_threads=1, chunk_bytes=PAGE)
        reads = [reader.submit_whole(aligned(PAGE), 0) for _ in range(40)]
        reader.close()
        if any(read.join() is not None for read in reads):
            with pytest.raises(CheckpointError, match="is closed"):
                reads[-1].wait()
            return
    pytest.skip("every read was over before it could be given up")

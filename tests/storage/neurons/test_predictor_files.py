"""Files of predictors that are damaged, of another store, or of another shape are refused before anything runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.storage.neurons.test_neurons import WIDTH, checkpoint
from vivace.checkpoint.files import read_tensors, write_tensors
from vivace.errors import CorruptError, MismatchError
from vivace.storage.convert import write_store
from vivace.storage.neurons import ordering, predictors, thresholds
from vivace.storage.neurons.predictors import Predictor, load_predictors, save_predictors
from vivace.storage.store import Store

AGAIN = r"predictors\.safetensors.*--calibrate"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    checkpoint("llama", folder / "model", intermediate_size=WIDTH, hidden_act="relu")
    return write_store(folder / "model", folder / "store", layout="neurons", dtype="float32")


@pytest.fixture
def store(written: Store, tmp_path: Path) -> Store:
    """A copy of the store with predictors."""
    shutil.copytree(written.folder, tmp_path / "store")
    copied = replace(written, folder=tmp_path / "store")
    draw = torch.Generator().manual_seed(0)

    def one(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    save_predictors(copied, [Predictor(one(4, 32), one(WIDTH, 4), one(WIDTH)) for _ in range(3)])
    return copied


def test_what_was_written_is_read(store: Store) -> None:
    assert [tuple(each.up.shape) for each in load_predictors(store)] == [(WIDTH, 4)] * 3


def test_of_another_store(store: Store) -> None:
    with pytest.raises(MismatchError, match=r"belongs to another store.*--calibrate"):
        load_predictors(replace(store, identity="0" * 16))


def test_a_flipped_bit(store: Store) -> None:
    path = store.folder / predictors.FILE
    content = bytearray(path.read_bytes())
    content[-400] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=AGAIN):
        load_predictors(store)


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_cut_file(store: Store, size: int) -> None:
    path = store.folder / predictors.FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptError, match=AGAIN):
        load_predictors(store)


def of_an_earlier_version(store: Store, **changes: Tensor) -> None:
    """Write the tensors again with some of layer 1 replaced, and without the name of the store and the checksum."""
    path = store.folder / predictors.FILE
    changed = {f"layers.1.{name}": values for name, values in changes.items()}
    write_tensors(path, {name: values.clone() for name, values in read_tensors(path).items()} | changed)


def test_of_an_earlier_version(store: Store) -> None:
    of_an_earlier_version(store)
    assert len(load_predictors(store)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"down": torch.zeros(4, 31)},
        {"down": torch.zeros(32)},
        {"down": torch.zeros(3, 32)},
        {"down": torch.zeros(0, 32), "up": torch.zeros(WIDTH, 0)},
        {"down": torch.zeros(4, 32, 1)},
        {"up": torch.zeros(WIDTH)},
        {"bias": torch.zeros(())},
        {"bias": torch.zeros(1)},
        {"bias": torch.zeros(WIDTH, 1)},
        {"bias": torch.zeros(WIDTH, dtype=torch.int64)},
        {"down": torch.zeros(4, 32, dtype=torch.bfloat16)},
        {"down": torch.zeros(4, 32, dtype=torch.int8), "up": torch.zeros(WIDTH, 4, dtype=torch.int8)},
    ],
)
def test_what_does_not_fit(store: Store, changes: dict[str, Tensor]) -> None:
    of_an_earlier_version(store, **changes)
    with pytest.raises(MismatchError, match=r"predictors\.safetensors does not fit layer 1 .*--calibrate"):
        load_predictors(store)


def test_of_more_layers(store: Store) -> None:
    of_an_earlier_version(store)
    with pytest.raises(MismatchError, match=r"has no layers\.2\.bias.*--calibrate"):
        load_predictors(replace(store, config=replace(store.config, num_layers=2)))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "shape"), [("down", (4, 32)), ("up", (WIDTH, 4)), ("bias", (WIDTH,))])
def test_no_numbers(store: Store, name: str, shape: tuple[int, ...], number: float) -> None:
    of_an_earlier_version(store, **{name: torch.full(shape, number)})
    with pytest.raises(CorruptError, match=r"layer 1 .*--calibrate"):
        load_predictors(store)


def test_a_kill_between_files_leaves_nothing_of_the_old_store(
    store: Store, written: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learnt of the old store is gone before the first file of the new one takes its place."""
    for name in (ordering.FILE, thresholds.FILE):
        (store.folder / name).write_bytes(b"of the old store")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_store(written.folder.parent / "model", store.folder, layout="neurons", dtype="float32")
    assert not {ordering.FILE, predictors.FILE, thresholds.FILE} & {path.name for path in store.folder.iterdir()}

"""Stores of experts on devices that are too small, damaged, cut short, failing or slow: a line each, and the engine
answers afterwards as before.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vivace
from tests.storage.experts.test_engine import make_foresight
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.engine.engine import Engine
from vivace.errors import CapacityError, CheckpointError, CorruptError, VivaceError
from vivace.storage.convert import write_store
from vivace.storage.io import native_reader
from vivace.storage.store import open_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture, its store and weights that predict its experts."""
    made = tmp_path_factory.mktemp("experts")
    upcycle_checkpoint(make_checkpoint(made / "dense", layers=6), made / "moe", num_experts=8, noise=0.5)
    write_store(made / "moe", made / "store")
    make_foresight(made / "ahead", made / "moe")
    return made


def ask(engine: Engine, method: str = "plain") -> tuple[int, ...]:
    """Token ids of a greedy answer."""
    return tuple(engine.generate("aka", method=method, max_new_tokens=12)[0].token_ids)


def few(store: Path, **settings: object) -> Engine:
    """Open a store with room for some of its experts."""
    planned = vivace.load(store, memory="100MiB").storage
    assert planned is not None
    budget = int(0.6 * planned.plan.num_bytes)
    planned.close()
    return vivace.load(store, memory=budget, **settings)  # type: ignore[arg-type]


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A store of the test's own, whose file may be damaged."""
    return Path(shutil.copytree(folder / "store", tmp_path / "store"))


@pytest.fixture
def engine(copied: Path) -> Iterator[Engine]:
    opened = few(copied, reader="buffered")
    yield opened
    assert opened.storage is not None
    opened.storage.close()


def one_line(error: BaseException) -> str:
    said = str(error)
    assert said
    assert "\n" not in said
    return said


def test_a_budget_below_what_a_layer_needs_names_the_least_and_that_is_enough(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"are too few for .*give at least \d") as found:
        vivace.load(folder / "store", memory=100_000)
    number, unit = one_line(found.value).rsplit("at least ", 1)[1].split()[:2]
    least = float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit.rstrip(".;,")]
    opened = vivace.load(folder / "store", memory=int(least))
    resident = vivace.load(folder / "moe", kernels="torch")
    assert ask(opened) == ask(resident)


def test_changed_and_cut_experts_end_an_answer_and_nothing_else(copied: Path, engine: Engine) -> None:
    plain = ask(engine)
    path = open_store(copied).path
    whole = path.read_bytes()
    places = [b.offset for name, b in open_store(copied).bundles.items() if ".experts." in name]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(bytes([whole[place] ^ 1]))
    with pytest.raises(CorruptError, match="is damaged") as found:
        ask(engine)
    one_line(found.value)
    path.write_bytes(whole)
    assert ask(engine) == plain
    os.truncate(path, min(places))
    with pytest.raises(CheckpointError) as cut:
        ask(engine)
    assert "end" in one_line(cut.value)
    path.write_bytes(whole)
    assert ask(engine) == plain


@pytest.mark.parametrize("method", ["plain", "foresight"])
def test_a_device_that_fails_and_stalls_in_mid_stream(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_reader, "found_library", lambda: None)  # reads of Python's threads can be injected
    opened = few(folder / "store", reader="buffered", adapters=folder / "ahead")
    plain = ask(opened, method)
    read, counted = os.preadv, [0]

    def stalling(file: int, into: list[memoryview], at: int) -> int:
        counted[0] += 1
        if counted[0] == 5:
            time.sleep(0.5)
        return read(file, into, at)

    def failing(file: int, into: list[memoryview], at: int) -> int:
        counted[0] += 1
        if counted[0] > 5:
            raise OSError(5, "Input/output error")
        return read(file, into, at)

    monkeypatch.setattr(os, "preadv", stalling)
    assert ask(opened, method) == plain
    assert counted[0] >= 5
    counted[0] = 0
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match="check the disk") as found:
        ask(opened, method)
    one_line(found.value)
    monkeypatch.setattr(os, "preadv", read)
    assert ask(opened, method) == plain


@pytest.mark.parametrize("damage", ["cut", "noise", "config", "missing", "shape"])
def test_damaged_predictors_are_refused_in_a_line_and_the_store_opens_without_them(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    ahead = Path(shutil.copytree(folder / "ahead", tmp_path / "ahead"))
    weights, config = next(ahead.glob("*.safetensors")), ahead / "config.json"
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "noise":
        weights.write_bytes(b"\xff" * len(content))
    elif damage == "config":
        config.write_text(config.read_text()[:-20])
    elif damage == "missing":
        weights.unlink()
    else:
        told = json.loads(config.read_text())
        told["config"]["forecast"] += 1
        config.write_text(json.dumps(told))
    with pytest.raises(VivaceError) as found:
        ask(few(folder / "store", adapters=ahead), "foresight")
    assert "ahead" in one_line(found.value)
    assert ask(few(folder / "store")) == ask(vivace.load(folder / "moe", kernels="torch"))

"""A byte that changes on the disk: an error that names what is damaged, whoever reads it; then the engine goes on."""

from __future__ import annotations

import ctypes
import json
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import vivace
from tests.decode.runs import Result
from tests.parity.families import make
from tests.storage.stored import TOKENS, answers, opened, same
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.model import Decoder
from vivace.errors import CorruptError
from vivace.kernels.choice import choose
from vivace.kernels.native import NativeBody
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.io import checksums, native_reader
from vivace.storage.io.checksums import CheckedReader, load_page_sums
from vivace.storage.io.readers import PAGE, READERS, BufferedReader, aligned
from vivace.storage.loading import Storage, load_stored
from vivace.storage.neurons.predictors import Predictor, save_predictors
from vivace.storage.store import INDEX, Store, open_store, verify

KINDS = ("layer", "tiles", "expert", "neurons", "selected")


@dataclass(frozen=True)
class Case:
    store: Store
    share: float
    """Of the memory that all of it takes."""
    unit: str
    """A bundle that is streamed then."""
    message: str

    @property
    def body(self) -> NativeBody | None:
        """What its tiles need."""
        return choose("auto").body if self.store.is_tiled else None


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    make({"expert": "qwen3_moe", "neurons": "opt", "selected": "llama"}.get(kind, "mistral")).save_pretrained(
        folder / "m"
    )
    match kind:
        case "layer":
            store = write_store(folder / "m", folder / "store", kernels="torch")
        case "tiles":
            if choose("auto").body is None:
                pytest.skip("native kernels do not run here")
            store = write_store(folder / "m", folder / "store", dtype="bfloat16")
        case "expert":
            store = write_store(folder / "m", folder / "store", kernels="torch")
        case _:
            store = write_store(folder / "m", folder / "store", layout=kind)
            if kind == "neurons":
                save_predictors(store, [everything(store) for _ in range(store.config.num_layers)])
    share = {"expert": 0.85, "layer": 0.8, "tiles": 0.8}.get(kind, 0.9)
    plan = plan_memory(store, int(plan_memory(store, None, TOKENS).num_bytes * share), TOKENS)
    unit = plan.streamed[len(plan.streamed) // 2]
    what = rf"neuron 3 of bundle {unit}" if kind in ("neurons", "selected") else f"bundle {unit}"
    return Case(store, share, unit, rf"weights\.store: {what} is damaged, .* convert the model again")


def everything(store: Store) -> Predictor:
    """Thinks that every neuron is active."""
    width, count = store.config.width, store.config.ffn_width
    down, up = torch.zeros(4, width), torch.zeros(count, 4)
    return Predictor(down.to(store.dtype), up.to(store.dtype), torch.ones(count).to(store.dtype))


@contextmanager
def flipped(store: Store, unit: str, record: int = 0, at: int = 5) -> Iterator[None]:
    """One bit of a unit is another for a while."""
    place = store[unit].start(record) + at
    flip(store.path, place)
    try:
        yield
    finally:
        flip(store.path, place)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture(
    params=[*((kind, "native") for kind in READERS if kind != "mmap"), *((kind, "python") for kind in READERS)]
)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every reader, with native threads and with Python's, which compare natively or with zlib."""
    name, threads = request.param
    if threads == "python":
        monkeypatch.setattr(native_reader, "found_library", lambda: None)
        if name == "buffered":
            monkeypatch.setattr(checksums, "found_library", lambda: None)
    elif native_reader.found_library() is None:
        pytest.skip("native reads are not built")
    try:
        READERS[name](Path(__file__)).close()
    except vivace.errors.UnsupportedError as exc:
        pytest.skip(str(exc))
    return str(name)


def test_a_damaged_unit_ends_the_answer_and_nothing_else(case: Case, reading: str) -> None:
    with opened(case.store, case.share, reading, body=case.body) as (model, storage):
        assert case.unit in storage.plan.streamed
        plain = answers(model)
        with flipped(case.store, case.unit, record=3 if case.store[case.unit].count > 1 else 0):
            for _ in range(2):
                with pytest.raises(CorruptError, match=case.message):
                    answer_anew(model, storage)
        found = answers(model)
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        assert same(found, plain) or storage.neurons is not None


def answer_anew(model: Decoder, storage: Storage) -> list[Result]:
    """Answers for which every expert is read that they need, whatever is there from before."""
    if storage.experts is not None:
        storage.experts.slots.empty(storage.experts.slots.keys)
    return answers(model)


@pytest.mark.parametrize("case", ["neurons", "selected"], indirect=True)
def test_active_neurons_are_compared_as_well_as_whole_layers(case: Case, reading: str) -> None:
    """While decoding only some records are read, among neighbours and alone."""
    with opened(case.store, case.share, reading) as (_, storage):
        assert storage.neurons is not None
        layer = int(case.unit.split(".")[1])
        for active in ([3], [1, 2, 3, 4], [0, 3, 9]):
            with flipped(case.store, case.unit, record=3), pytest.raises(CorruptError, match=case.message):
                list(storage.neurons.bring(layer, torch.tensor(active)))
            records = list(storage.neurons.bring(layer, torch.tensor(active)))
            assert sorted(n for r in records for n in r.neurons[r.first : r.stop].tolist()) == active
            storage.neurons.caches[layer].forget()


def test_every_page_is_compared(case: Case) -> None:
    """Also what lies between bundles: whatever a read brings."""
    pages = load_page_sums(case.store)
    assert pages is not None
    assert pages.count * PAGE == case.store.num_bytes - -(-4 * pages.count // PAGE) * PAGE
    reader = CheckedReader(BufferedReader(case.store.path), pages)
    memory = aligned(pages.count * PAGE)
    reader.read(0, memory)
    for place in (0, PAGE, pages.count * PAGE - 1, random.Random(0).randrange(pages.count * PAGE)):
        flip(case.store.path, place)
        with pytest.raises(CorruptError, match="is damaged"):
            reader.read(place // PAGE * PAGE, memory[:PAGE])
        flip(case.store.path, place)
    reader.read(0, memory)
    reader.close()


def test_both_ways_to_sum_are_zlibs(library: ctypes.CDLL) -> None:
    memory = aligned(7 * PAGE)
    memory[:] = random.Random(1).randbytes(5 * PAGE) + bytes(PAGE) + b"\xff" * PAGE
    out = (ctypes.c_uint32 * 7)()
    for by_table in (0, 1):
        library.vivace_page_sums(checksums.address(memory), 7, out, by_table)
        assert list(out) == [zlib.crc32(memory[first : first + PAGE]) for first in range(0, 7 * PAGE, PAGE)]


def test_a_damaged_table_is_refused(case: Case) -> None:
    assert case.store.page_sums is not None
    flip(case.store.path, case.store.page_sums.offset + 2)
    try:
        with pytest.raises(CorruptError, match="its table of checksums is damaged"):
            load_stored(case.store.folder, reader="buffered", body=case.body)
        with pytest.raises(CorruptError, match="its table of checksums is damaged"):
            verify(case.store)
    finally:
        flip(case.store.path, case.store.page_sums.offset + 2)
    verify(case.store)


def as_before(store: Store, folder: Path) -> Store:
    """As a version wrote it that had no checksums of pages."""
    folder.mkdir()
    for path in store.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    index = json.loads((folder / INDEX).read_text())
    del index["page_sums"]
    (folder / INDEX).write_text(json.dumps({**index, "format": 2 if store.is_tiled else 1}))
    return open_store(folder)


def test_a_store_of_before_opens_and_says_that_it_is_unchecked(case: Case, tmp_path: Path) -> None:
    store = as_before(case.store, tmp_path / "store")
    with opened(case.store, case.share, body=case.body) as (model, storage):
        plain = answers(model)
        assert storage.facts["is_checked"]
        assert "unnoticed" not in storage.report
    with opened(store, case.share, body=case.body) as (model, storage):
        assert same(answers(model), plain)
        assert not storage.facts["is_checked"]
        assert "damage to the file goes unnoticed" in storage.report
        assert "convert the model again" in storage.report
        assert "\n" not in storage.report


def ask(engine: vivace.Engine) -> tuple[int, ...]:
    return engine.generate("a b c", max_new_tokens=4)[0].token_ids


def test_an_engine_goes_on(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", layers=8)
    store = write_store(tmp_path / "model", tmp_path / "store")
    whole = plan_memory(store, None, 128).num_bytes
    engine = vivace.load(store.folder, memory=int(whole * 0.85), reader="buffered")
    assert engine.storage is not None
    plain = ask(engine)
    with flipped(store, engine.storage.plan.streamed[0]), pytest.raises(CorruptError, match="is damaged"):
        ask(engine)
    assert ask(engine) == plain
    engine.storage.close()

"""Stores: what is written is what the checkpoint holds, and what is damaged is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.families import CONFIGS, make
from vivace.checkpoint.files import read_json
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
)
from vivace.kernels.choice import choose
from vivace.storage.convert import write_store
from vivace.storage.loading import load_stored
from vivace.storage.store import DATA, INDEX, PAGE, Layout, Store, in_rows, open_store, verify


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opt")
    make("opt").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make("llama").save_pretrained(folder, max_shard_size="20KB")
    return folder


def memory_of(store: Store, name: str) -> torch.Tensor:
    bundle = store[name]
    raw = store.path.read_bytes()[bundle.offset : bundle.offset + bundle.num_bytes]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def parameters(model: Decoder) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_hold_every_parameter_bit_for_bit(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store")
    expected = parameters(load_decoder(tmp_path / "model"))
    found = {n: t for name in store.bundles for n, t in store.tensors(name, memory_of(store, name)).items()}
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(bundle.offset % PAGE == 0 for bundle in store.bundles.values())
    verify(store)


def test_experts_are_one_bundle_each(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store")
    assert [name for name in store.bundles if name.startswith("layers.2.")] == [
        "layers.2.attention",
        *(f"layers.2.experts.{expert}" for expert in range(6)),
    ]
    assert store["layers.2.experts.3"].num_bytes == 3 * 24 * 32 * 4


@pytest.mark.parametrize("layout", ["neurons", "selected"])
def test_neurons_without_a_gate(opt: Path, tmp_path: Path, layout: Layout) -> None:
    store = write_store(opt, tmp_path / "store", layout=layout)
    model = parameters(load_decoder(opt))
    up, down = model["layers.1.feed_forward.up.weight"], model["layers.1.feed_forward.down.weight"]
    bundle = store["layers.1.neurons"]
    assert (bundle.count, bundle.stride) == (56, PAGE)
    found = store.records("layers.1.neurons", memory_of(store, "layers.1.neurons").view(56, -1))
    assert torch.equal(found["down"], down.t())
    if layout == "neurons":
        assert torch.equal(found["up"], up)
    else:
        assert set(found) == {"down"}
        assert torch.equal(store.tensors("layers.1.selector", memory_of(store, "layers.1.selector"))["selector"], up)
    verify(store)


def test_neurons_with_a_gate(llama: Path, tmp_path: Path) -> None:
    store = write_store(llama, tmp_path / "store", layout="selected")
    model = parameters(load_decoder(llama))
    gate, up = model["layers.2.feed_forward.up.weight"].chunk(2)
    down = model["layers.2.feed_forward.down.weight"]
    found = store.records("layers.2.neurons", memory_of(store, "layers.2.neurons").view(48, -1))
    assert torch.equal(found["up"], up)
    assert torch.equal(found["down"], down.t())
    selector = store.tensors("layers.2.selector", memory_of(store, "layers.2.selector"))["selector"]
    assert torch.equal(selector, gate)


def test_converting_holds_less_than_a_layer(opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vivace.storage import convert

    held: list[int] = []
    whole = convert._bytes

    def noting(values: torch.Tensor) -> memoryview:
        held.append(values.nbytes)
        return whole(values)

    monkeypatch.setattr(convert, "_bytes", noting)
    store = write_store(opt, tmp_path / "store")
    layer = sum(b.num_bytes for name, b in store.bundles.items() if name.startswith("layers.0."))
    assert max(held[len(store["resident"].parts) :]) < layer


def test_dtype(opt: Path, tmp_path: Path) -> None:
    store = write_store(opt, tmp_path / "store", dtype="bfloat16")
    found = store.tensors("layers.0.attention", memory_of(store, "layers.0.attention"))
    resident = load_decoder(opt, dtype="bfloat16").get_parameter("layers.0.o.weight")
    assert torch.equal(in_rows(found["layers.0.o.weight"]), resident)


def test_tiles(tmp_path: Path, library: object) -> None:
    """What native kernels read, on a machine that has them; the same bits, in as many bytes."""
    make("mistral").save_pretrained(tmp_path / "model")
    rows = write_store(tmp_path / "model", tmp_path / "rows", dtype="bfloat16", kernels="torch")
    tiles = write_store(tmp_path / "model", tmp_path / "tiles", dtype="bfloat16")
    assert (rows.is_tiled, tiles.is_tiled) == (False, True)
    assert rows.num_bytes == tiles.num_bytes
    assert [read_json(store.folder / INDEX)["format"] for store in (rows, tiles)] == [3, 3]
    for name in rows.bundles:
        ours, plain = (store.tensors(name, memory_of(store, name)) for store in (tiles, rows))
        assert all(torch.equal(in_rows(ours[part]), plain[part]) for part in plain)
        assert all((value.dim() == 4) == (name != "resident") for value in ours.values())
    verify(tiles)
    with pytest.raises(UnsupportedError, match="this store has layout layers in float32; leave out --kernels"):
        write_store(tmp_path / "model", tmp_path / "never", dtype="float32", kernels=best_body())
    with pytest.raises(UnsupportedError, match="convert the model with --kernels torch"):
        load_stored(tiles.folder)


def best_body() -> str:
    return choose("auto").name


@pytest.fixture
def store(opt: Path, tmp_path: Path) -> Store:
    return write_store(opt, tmp_path / "store")


def test_truncated(store: Store) -> None:
    with store.path.open("r+b") as file:
        file.truncate(store.num_bytes - 1)
    with pytest.raises(CorruptError, match=f"has {store.num_bytes - 1} bytes, its index says {store.num_bytes}"):
        open_store(store.folder)


def test_foreign(store: Store, opt: Path, tmp_path: Path) -> None:
    other = write_store(opt, tmp_path / "other")
    store.path.write_bytes(other.path.read_bytes())
    with pytest.raises(MismatchError, match=f"belongs to index {other.identity}"):
        open_store(store.folder)
    store.path.write_bytes(b"something else" * 1000)
    with pytest.raises(MismatchError, match="is no store"):
        open_store(store.folder)


def test_a_flipped_bit(store: Store) -> None:
    raw = bytearray(store.path.read_bytes())
    raw[store["layers.1.attention"].offset + 5] ^= 1
    store.path.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"bundle layers\.1\.attention has checksum"):
        verify(open_store(store.folder))


@pytest.mark.parametrize(
    ("change", "error"),
    [({"format": 5}, MismatchError), ({"layout": "rows"}, CorruptError), ({"bundles": [{"name": "x"}]}, CorruptError)],
)
def test_a_strange_index(store: Store, change: dict[str, Any], error: type[Exception]) -> None:
    index = json.loads((store.folder / INDEX).read_text())
    (store.folder / INDEX).write_text(json.dumps({**index, **change}))
    with pytest.raises(error):
        open_store(store.folder)


def test_missing(store: Store, opt: Path) -> None:
    with pytest.raises(NotFoundError, match=INDEX):
        open_store(opt)
    store.path.unlink()
    with pytest.raises(NotFoundError, match=DATA):
        open_store(store.folder)


def test_refused(opt: Path, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this one has silu"):
        write_store(llama, tmp_path / "store", layout="neurons")
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        write_store(opt, tmp_path / "store", layout="layer")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="holds something else"):
        write_store(opt, llama)
    assert not (tmp_path / "store").exists()


def test_a_full_disk_leaves_what_was_there(store: Store, opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vivace.storage import convert

    def full(values: torch.Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "_bytes", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_store(opt, store.folder)
    assert open_store(store.folder) == store
    assert [path.name for path in store.folder.parent.iterdir()] == ["store"]


def test_a_store_in_the_place_of_another_keeps_nothing_that_answers_depend_on(opt: Path, tmp_path: Path) -> None:
    first, second, target = tmp_path / "first", tmp_path / "second", tmp_path / "store"
    for folder in (first, second):
        make("llama").save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    (first / "generation_config.json").write_text('{"temperature": 3.0, "do_sample": true}')
    (first / "chat_template.jinja").write_text("always the same")
    write_store(first, target)
    (target / "notes.txt").write_text("mine")
    write_store(second, target)
    assert not (target / "generation_config.json").exists()
    assert not (target / "chat_template.jinja").exists()
    assert (target / "notes.txt").read_text() == "mine"
    (target / "adapters" / "lookup").mkdir(parents=True)
    write_store(second, target)  # the same model: what was trained for it stays
    assert (target / "adapters" / "lookup").is_dir()
    with pytest.raises(ConfigError, match="has adapters of the model that lies there now"):
        write_store(opt, target)


def test_an_index_that_lacks_bundles_or_names_no_dtype_is_damaged(llama: Path, tmp_path: Path) -> None:
    store = write_store(llama, tmp_path / "store")
    index = read_json(store.folder / INDEX)
    (store.folder / INDEX).write_text(json.dumps({**index, "dtype": "nothing"}))
    with pytest.raises(CorruptError, match="not an index of a store"):
        open_store(store.folder)
    (store.folder / INDEX).write_text(json.dumps({**index, "bundles": index["bundles"][:-1]}))
    with pytest.raises(CorruptError, match=r"the index of .* lacks .*convert the model again"):
        load_stored(store.folder)


def test_bundles_that_changed_places_or_have_strange_numbers_are_noticed(llama: Path, tmp_path: Path) -> None:
    """Each page has a checksum by its place in the file, so two whole bundles could change places unnoticed."""
    folder = write_store(llama, tmp_path / "store").folder
    whole = json.loads((folder / "store.json").read_text())

    def refused(change: Callable[[dict[str, Any]], object]) -> None:
        index = json.loads(json.dumps(whole))
        change(index)
        (folder / "store.json").write_text(json.dumps(index))
        with pytest.raises(CorruptError, match="is not an index of a store"):
            open_store(folder)

    def exchange(index: dict[str, Any]) -> None:
        first, second = (next(b for b in index["bundles"] if b["name"] == f"layers.{n}.attention") for n in (0, 1))
        first["offset"], second["offset"] = second["offset"], first["offset"]

    refused(exchange)
    for key, values in {"offset": ("x", None, -1), "num_bytes": (None, "x", 1.5), "stride": (None,)}.items():
        for value in values:
            refused(lambda index, key=key, value=value: index["bundles"][1].update({key: value}))  # type: ignore[misc]
    for value in ([10**9, 2], None, ["x"]):
        refused(lambda index, value=value: index["bundles"][1]["parts"][0].update(shape=value))  # type: ignore[misc]
    refused(lambda index: index["bundles"][1]["parts"][0].update(name="other"))
    refused(lambda index: index.update(bytes=None))

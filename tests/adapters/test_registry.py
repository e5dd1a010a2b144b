"""The registry of adapters: its limit, who leaves first, what running requests pin, and what is refused."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters import registry as registry_module
from vivace.adapters.lora import FactorFile
from vivace.adapters.registry import Registry
from vivace.checkpoint.lora_config import CONFIG
from vivace.checkpoint.peft import TENSORS
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine
from vivace.errors import BusyError, CapacityError, ConfigError, CorruptError, MismatchError, NotFoundError

PLAIN: dict[str, Any] = {"max_new_tokens": 4, "method": "plain"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("registry"))


@pytest.fixture
def loras(base: Path, tmp_path: Path) -> dict[str, Path]:
    return {name: make_lora(tmp_path / name, base, seed=seed) for seed, name in enumerate("abcd")}


def open_registry(base: Path, loras: dict[str, Path], room: float) -> Engine:
    """An engine with room for so many of these adapters, which are all of one size."""
    size = vivace.load(base, dtype="bfloat16", adapters={"a": loras["a"]}).adapters.num_bytes
    return vivace.load(base, dtype="bfloat16", adapters=loras, adapter_memory=int(size * room))


def test_the_least_recently_used_leaves(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=2.5)
    registry = engine.adapters
    assert registry.resident == ["c", "d"]
    first = engine.generate("x", adapter="a", **PLAIN)[0].token_ids
    assert registry.resident == ["d", "a"]
    engine.generate("x", adapter="d", **PLAIN)
    engine.generate("x", adapter="b", **PLAIN)
    assert registry.resident == ["d", "b"]
    assert engine.generate("x", adapter="a", **PLAIN)[0].token_ids == first
    assert registry.num_bytes <= (registry.max_bytes or 0)
    assert (registry.num_loads, registry.num_evicted) == (7, 5)


def test_one_that_comes_back_takes_few_pieces_of_memory(base: Path, loras: dict[str, Path]) -> None:
    """A few pieces are given back whole; one for each matrix would leave gaps behind."""
    registry = open_registry(base, loras, room=1.5).adapters
    factors = registry.pinned(registry.find("a")).deltas(torch.zeros(1, dtype=torch.int64))
    assert registry.resident == ["a"]
    shapes = {up.shape for up in factors.up.values()}
    assert len(shapes) < len(factors.up)
    held = [*factors.down.values(), *factors.up.values()]
    assert len({each.untyped_storage().data_ptr() for each in held}) == 1
    for _, packed in (factors.kept or {}).values():
        assert len({each.untyped_storage().data_ptr() for each in packed[1::2]}) == len(shapes)


@pytest.mark.parametrize("kind", ["as written", "scaled", "bfloat16", "scaled bfloat16"])
def test_a_file_is_read_again_at_once_and_in_the_same_bits(base: Path, tmp_path: Path, kind: str) -> None:
    lora = make_lora(tmp_path / "lora", base)
    if "scaled" in kind:
        written = json.loads((lora / CONFIG).read_text())
        (lora / CONFIG).write_text(json.dumps({**written, "lora_alpha": 3 * written["lora_alpha"]}))
    if "bfloat16" in kind:
        tensors = load_file(lora / TENSORS)
        save_file({name: each.bfloat16() for name, each in tensors.items()}, lora / TENSORS)
    known = vivace.load(base, dtype="bfloat16", adapters={"a": lora}).adapters.find("a")
    assert known.factors is not None
    assert known.file is not None, "read one by one"
    again = known.file.read()
    assert torch.equal(again.memory, known.factors.memory)
    assert again.layout == known.factors.layout
    with (lora / TENSORS).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptError, match="is not of the length that it had"):
        known.file.read()


@pytest.mark.parametrize("kind", ["two dtypes", "two scales", "another order"])
def test_a_file_in_another_order_is_read_one_by_one(base: Path, tmp_path: Path, kind: str) -> None:
    lora = make_lora(tmp_path / "lora", base)
    written, tensors = json.loads((lora / CONFIG).read_text()), load_file(lora / TENSORS)
    first = next(iter(tensors))
    if kind == "two dtypes":
        save_file({**tensors, first: tensors[first].bfloat16()}, lora / TENSORS)
    elif kind == "two scales":
        (lora / CONFIG).write_text(json.dumps({**written, "alpha_pattern": {"q_proj": 3}}))
    else:
        header = {}
        at, data = 0, b""
        for name in reversed(tensors):
            part = tensors[name].numpy().tobytes()
            header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [at, at + len(part)]}
            at, data = at + len(part), data + part
        text = json.dumps(header).encode()
        (lora / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    engine = vivace.load(base, dtype="bfloat16", adapters={"a": lora})
    known = engine.adapters.find("a")
    before = engine.generate("x", adapter="a", **PLAIN)[0].token_ids
    if kind != "another order":  # a reader may take tensors in the order in which they lie
        assert known.file is None
    known.factors = known.pin = None
    assert engine.generate("x", adapter="a", **PLAIN)[0].token_ids == before
    assert engine.adapters.num_loads == 2


def session_of(engine: Engine, *names: str | None) -> tuple[Session, list[Request]]:
    requests = [engine.request("abc", vivace.engine.Options(adapter=name, **PLAIN)) for name in names]
    return Session(engine.model, num_slots=4, capacity=64, memory=engine.memory), requests


def test_who_runs_stays_and_who_finds_no_room_waits(base: Path, loras: dict[str, Path]) -> None:
    """Of four adapters two have room: the others' requests wait, and everybody gets what it gets alone."""
    engine = open_registry(base, loras, room=2.5)
    alone = {name: engine.generate("abc", adapter=name, **PLAIN)[0].token_ids for name in loras}
    session, requests = session_of(engine, *loras, None)
    numbers = {session.admit(request): name for request, name in zip(requests, [*loras, None], strict=True)}
    found: dict[str | None, tuple[int, ...]] = {}
    most = 0
    while not session.is_idle:
        for emitted in session.step():
            assert emitted.error is None
            name = numbers[emitted.request_id]
            found[name] = found.get(name, ()) + emitted.tokens
        most = max(most, engine.adapters.num_bytes)
    assert {name: found[name] for name in loras} == alone
    assert most <= (engine.adapters.max_bytes or 0)


def test_an_adapter_in_use_is_not_removed(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=4.5)
    session, [running] = session_of(engine, "a")
    with pytest.raises(BusyError, match="adapter 'a' is in use"):
        engine.adapters.remove("a")  # it waits
    session.admit(running)
    session.step()
    with pytest.raises(BusyError, match="adapter 'a' is in use"):
        engine.adapters.remove("a")
    engine.adapters.remove("b")
    session.close()
    engine.adapters.remove("a")
    assert engine.adapters.names == ["c", "d"]
    with pytest.raises(NotFoundError, match="there is no adapter 'a'"):
        engine.generate("x", adapter="a", **PLAIN)


def test_what_all_wear_is_not_removed(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=4.5)
    engine.adapters.default = "a"
    with pytest.raises(BusyError, match="adapter 'a' is worn by all requests that name none"):
        engine.adapters.remove("a")
    assert engine.generate("x", **PLAIN)


def test_an_adapter_of_a_request_that_lost_its_slot_is_not_removed(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=4.5)
    session, [request] = session_of(engine, "a")
    session.admit(request)
    session.step()
    session._preempt(next(iter(session._live.values())))
    gc.collect()
    with pytest.raises(BusyError, match="adapter 'a' is in use"):
        engine.adapters.remove("a")
    while not session.is_idle:
        session.step()
    del session, request
    engine.adapters.remove("a")


def test_two_threads_cannot_take_one_name(base: Path, loras: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    registry = vivace.load(base, dtype="bfloat16").adapters
    both, read = threading.Barrier(2, timeout=20), registry_module.lora_factors

    def slow(*given: Any, **named: Any) -> Any:
        both.wait()  # both threads have found the name free
        return read(*given, **named)

    monkeypatch.setattr(registry_module, "lora_factors", slow)
    with ThreadPoolExecutor(2) as pool:
        tried = [pool.submit(registry.add, "x", loras[name]) for name in "ab"]
    [taken] = [future.result() for future in tried if future.exception() is None]
    [refused] = [error for future in tried if (error := future.exception()) is not None]
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith("the name 'x' is taken by")
    assert registry.find("x") is taken


def test_files_that_cannot_be_read_again_end_their_request_alone(
    base: Path, loras: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_registry(base, loras, room=2.5)
    assert engine.adapters.resident == ["c", "d"]
    session, requests = session_of(engine, "d", "a")
    numbers = [session.admit(requests[0])]

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(FactorFile, "read", fail)
    while not session.can_begin(requests[1]):  # as the server's thread asks, which has to survive
        time.sleep(0.001)
    numbers.append(session.admit(requests[1]))
    errors: dict[int, str] = {}
    while not session.is_idle:
        errors |= {emitted.request_id: str(emitted.error) for emitted in session.step()}
    assert errors[numbers[0]] == "None"
    assert "Too many open files" in errors[numbers[1]]


def test_a_cancelled_request_lets_go(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=1.5)
    session, requests = session_of(engine, "a", "b")
    session.admit(requests[0])
    session.step()
    with pytest.raises(BusyError, match="running requests carry"):
        _ = requests[1].adapter.bank  # type: ignore[union-attr]
    session.cancel(0)
    assert requests[1].adapter is not None
    assert requests[1].adapter.bank is not None
    assert requests[1].adapter.is_ready()


def test_memory_comes_back(base: Path, loras: dict[str, Path]) -> None:
    """The engine's limit counts adapters while they are in memory and no longer."""
    engine = vivace.load(base, dtype="bfloat16", adapters=loras, memory="4MiB")
    held = engine.memory.held_bytes
    each = engine.adapters.num_bytes // len(loras)
    engine.adapters.remove("d")
    gc.collect()
    assert engine.memory.held_bytes == held - each
    assert "adapter a" in engine.memory.report


def test_what_is_refused(base: Path, loras: dict[str, Path]) -> None:
    with pytest.raises(CapacityError, match=r"adapter 'a' takes .*, more than the 100 B for all adapters"):
        vivace.load(base, adapters=loras, adapter_memory=100)
    registry = open_registry(base, loras, room=4.5).adapters
    with pytest.raises(ConfigError, match="the name 'a' is taken by"):
        registry.add("a", loras["b"])
    for name in ("", "..", "a/b", "/a", "a b", "x" * 101, "a\n"):
        with pytest.raises(ConfigError, match="cannot name an adapter"):
            registry.add(name, loras["b"])


def test_what_is_read_for_others_makes_room(base: Path, loras: dict[str, Path]) -> None:
    """Nobody runs, and those that are read ahead have all the room: who begins now takes it."""
    engine = open_registry(base, loras, room=2.5)
    registry = engine.adapters
    registry.limit(registry.num_bytes // 2)
    registry.limit(registry.num_bytes * 5 // 2)
    _, requests = session_of(engine, "a", "b", "c")
    for request in requests[:2]:
        assert request.adapter is not None
        request.adapter.is_ready()
    first, second, third = (request.adapter for request in requests)
    assert first is not None
    assert second is not None
    assert third is not None
    assert third.bank is not None  # waits for what is read, and takes its room
    assert first.bank is not None
    assert len(registry.resident) <= 2


def test_those_that_came_first_keep_what_was_read_for_them(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=2.5)
    registry = engine.adapters
    _, requests = session_of(engine, "a", "b", "c")
    first, second, third = (request.adapter for request in requests)
    assert first is not None
    assert second is not None
    assert third is not None
    for source in (first, second):
        while not source.is_ready():
            time.sleep(0.001)
    assert not third.is_ready()
    assert set(registry.resident) == {"a", "b"}


def test_a_lower_limit_holds_at_once(base: Path, loras: dict[str, Path]) -> None:
    registry = open_registry(base, loras, room=4.5).adapters
    each = registry.num_bytes // len(loras)
    registry.limit(2 * each)
    assert registry.resident == ["c", "d"]
    assert registry.num_bytes == 2 * each
    with pytest.raises(CapacityError, match="more than the"):
        registry.limit(each - 1)
    registry.limit(None)
    assert registry.source("a").bank is not None


def test_files_that_change_are_noticed(base: Path, loras: dict[str, Path]) -> None:
    """A request keeps the version it began with, or fails; it never gets another one."""
    engine = open_registry(base, loras, room=1.5)
    shutil.copytree(loras["b"], loras["a"], dirs_exist_ok=True)
    with pytest.raises(MismatchError, match="was changed while it was in use; unload it and load it again"):
        engine.generate("x", adapter="a", **PLAIN)
    assert engine.generate("x", adapter="c", **PLAIN)
    engine.adapters.remove("a")
    engine.adapters.add("a", loras["a"])
    assert engine.generate("x", adapter="a", **PLAIN)[0].token_ids == (
        engine.generate("x", adapter="b", **PLAIN)[0].token_ids
    )


def test_a_model_in_memory_has_no_registry(base: Path, loras: dict[str, Path]) -> None:
    engine = vivace.load(base)
    with pytest.raises(NotFoundError, match="this model has none"):
        Registry(engine.model, None, engine.memory).add("a", loras["a"])


def test_a_broken_one_leaves_the_others(base: Path, loras: dict[str, Path]) -> None:
    engine = open_registry(base, loras, room=2.5)
    weights = loras["a"] / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("inf")
    save_file(tensors, weights)
    before = engine.adapters.resident
    with pytest.raises(vivace.errors.CheckpointError):
        engine.adapters.add("e", loras["a"])
    assert engine.adapters.resident == before

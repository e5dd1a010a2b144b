"""Dense weights from flash: the resident model's bits, whatever the budget and the reader."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.decode.runs import Result
from tests.parity.families import CONFIGS, make
from tests.storage.stored import PROMPTS, TOKENS, answers, broken, opened, same
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.core.cpu import backend
from vivace.core.cpu.backend import pack_decoder
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.errors import CapacityError, CheckpointError, CorruptError
from vivace.kernels.native import NativeBody
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.io import native_reader
from vivace.storage.io.readers import READERS
from vivace.storage.loading import load_stored
from vivace.storage.store import Store

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "olmo2", "gpt2", "opt")


@dataclass(frozen=True)
class Case:
    store: Store
    plain: list[Result]
    folder: Path


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder / "model")
    dtype = "bfloat16" if request.param in ("llama", "phi3") else "float32"
    store = write_store(folder / "model", folder / "store", dtype=dtype, kernels="torch")
    return Case(store, answers(load_decoder(folder / "model", dtype=dtype)), folder)


@pytest.mark.parametrize("share", [None, 1.0, 0.95, 0.91])
def test_the_resident_models_bits(case: Case, share: float | None) -> None:
    with opened(case.store, share) as (model, storage):
        assert bool(storage.plan.streamed) == (share is not None and share < 1)
        assert same(answers(model), case.plain)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader(case: Case, reader: str) -> None:
    with opened(case.store, 0.91, reader) as (model, _):
        assert same(answers(model), case.plain)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("llama")
    make("llama").save_pretrained(folder / "model")
    return write_store(folder / "model", folder / "store")


@pytest.mark.parametrize("family", ["mistral", "qwen3", "opt", "gemma2"])
def test_native_kernels_stream_the_resident_models_bits(
    family: str, body: NativeBody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = CONFIGS["opt"]
    monkeypatch.setitem(CONFIGS, "opt", (kind, {**settings, "ffn_dim": 64}))  # whole tiles
    make(family).save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store", dtype="bfloat16")
    assert store.is_tiled
    resident = load_decoder(tmp_path / "model", dtype="bfloat16")
    pack_decoder(resident, body)
    plain = answers(resident)
    for share in (None, 0.95, 0.91):
        with opened(store, share, body=body) as (model, storage):
            assert bool(storage.plan.streamed) == (share is not None)
            assert storage.body is body
            assert same(answers(model), plain), share
            assert (model.backend.span is None) == (resident.backend.span is None or share is not None)


def test_drafts_change_nothing(llama: Store) -> None:
    plain = answers(load_decoder(llama.folder.parent / "model"))
    with opened(llama, 0.8) as (model, _):
        assert [r.tokens for r in answers(model, PROMPTS, PromptLookup(LookupConfig()))] == [r.tokens for r in plain]


def test_a_pass_reads_each_streamed_bundle_once(llama: Store) -> None:
    with opened(llama, 0.8) as (model, storage):
        before = storage.async_reader.traffic.num_bytes
        passes = 3 + sum(map(len, (r.tokens for r in answers(model, PROMPTS[:1]))))  # chunks of 16 of 36 tokens
        read = storage.async_reader.traffic.num_bytes - before
        once = storage.plan.pass_bytes(storage.store)
        ahead = sum(storage.store[unit].num_pages_bytes for unit in storage.plan.streamed[:1])
        assert passes * once <= read <= passes * once + ahead


def test_layers_in_another_order(llama: Store) -> None:
    """Calls that begin anywhere: wrong guesses cost time and nothing else."""
    resident = load_decoder(llama.folder.parent / "model")
    with opened(llama, 0.8) as (model, _), torch.inference_mode():
        for spans in ([(0, 1), (0, 1), (1, 3)], [(2, 3), (0, 3)], [(1, 2), (0, 1), (1, 2)]):
            assert torch.equal(through(model, spans), through(resident, spans))


def through(model: torch.nn.Module, spans: list[tuple[int, int]]) -> torch.Tensor:
    from vivace.core.step import Step

    step = Step.dense(1, 6)
    h = model.embed(torch.arange(6), step)  # type: ignore[operator]
    for start, stop in spans:
        h = model.run(h, step, start, stop)  # type: ignore[operator]
    return h


def test_a_file_cut_while_it_is_used(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store")
    whole = store.path.read_bytes()
    with opened(store, 0.8) as (model, _):
        plain = answers(model)
        os.truncate(store.path, store["layers.2.attention"].offset)
        with pytest.raises(CorruptError, match="ends early"):
            answers(model)
        store.path.write_bytes(whole)
        assert same(answers(model), plain)


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_a_disk_that_fails_now_and_then(llama: Store, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, left = os.preadv, [0]

    def failing(file: int, into: list[memoryview], at: int) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return whole(file, into, at)

    monkeypatch.setattr(
        native_reader, "found_library", lambda: None
    )  # threads of Python, whose reads can be made to fail
    with opened(llama, 0.8) as (model, _):
        plain = answers(model)
        monkeypatch.setattr(os, "preadv", failing)
        left[0] = failures
        errors = 0
        for _ in range(failures + 1):
            try:
                found = answers(model)
            except CheckpointError as exc:
                assert "Input/output error; check the disk" in str(exc)  # noqa: PT017 - how often is not fixed
                errors += 1
        assert left[0] == 0
        assert errors <= failures, "what failed ahead of its time is read again"
        assert same(found, plain)


def test_a_disk_that_fails_for_a_while(llama: Store, tmp_path: Path) -> None:
    with opened(llama, 0.8) as (model, storage):
        plain = answers(model)
        with broken(storage.reader.reader, tmp_path):
            with pytest.raises(CheckpointError, match="Is a directory; check"):
                answers(model)
            storage.stream.close()  # so that what is read ahead has failed too, whoever was faster
        assert same(answers(model), plain)


def test_what_was_read_ahead_of_a_disk_that_failed_is_read_again(llama: Store, tmp_path: Path) -> None:
    with opened(llama, 0.8) as (_, storage):
        stream = storage.stream
        parts = {unit: storage.store[unit].parts[0].name for unit in stream.units}
        wanted = {unit: stream.weight(unit, name).clone() for unit, name in parts.items()}
        with broken(storage.reader.reader, tmp_path):
            middle = len(stream.units) // 2  # those after the last one, the first, are there already
            far = stream.units[middle]
            with pytest.raises(CheckpointError, match="Is a directory; check"):
                stream.weight(far, parts[far])
            stream.close()
        for unit in stream.units[middle:]:
            assert torch.equal(stream.weight(unit, parts[unit]), wanted[unit])


def test_too_little_memory(llama: Store) -> None:
    least = 40_000
    with pytest.raises(CapacityError, match=r"39\.1 KiB of memory are too few for store: .*give at least \d") as found:
        load_stored(llama.folder, least, num_tokens=TOKENS)
    wanted = float(str(found.value).rsplit("at least ", 1)[1].split()[0]) * 1024
    plan = plan_memory(llama, int(wanted), TOKENS)
    assert plan.streamed
    assert plan.num_bytes <= wanted


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
@pytest.mark.parametrize("share", [0.8, 0.88, 0.95])
def test_plans_stay_in_their_budget(family: str, share: float, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store")
    budget = int(plan_memory(store, None, TOKENS).num_bytes * share)
    plan = plan_memory(store, budget, TOKENS)
    assert plan.num_bytes <= budget
    assert plan.expected(store, 1.0, 10.0) > plan.expected(store, 0.1, 10.0) > 0


def test_a_flipped_bit_is_found_when_it_is_loaded(llama: Store, tmp_path: Path) -> None:
    store = write_store(llama.folder.parent / "model", tmp_path / "store")
    raw = bytearray(store.path.read_bytes())
    raw[store["resident"].offset + 9] ^= 4
    store.path.write_bytes(raw)
    with pytest.raises(CorruptError, match="bundle resident is damaged"):
        load_stored(store.folder, reader="buffered")


@pytest.mark.parametrize("share", [None, 0.95, 0.85])
def test_experts_of_a_store(share: float | None, tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store")
    plain = answers(load_decoder(tmp_path / "model"))
    with opened(store, share) as (model, storage):
        assert same(answers(model), plain)
        assert storage.experts is not None
        assert (storage.experts.num_slots < 12) == (share is not None)
        assert "experts in memory" in storage.report


def test_a_head_is_screened_only_where_its_second_copy_fits(tmp_path: Path, body: NativeBody, monkeypatch) -> None:
    """It is no part of the plan, so a budget that is used up without it has none."""
    monkeypatch.setattr(backend, "SCREENED_BYTES", 1)
    store = write_store(make_checkpoint(tmp_path / "model"), tmp_path / "store", dtype="bfloat16", kernels=body.name)
    for share, is_screened in ((None, True), (4.0, True), (0.97, False)):
        with opened(store, share, body=body) as (model, _):
            assert (model.lm_head.screen is not None) is is_screened

"""Experts from a cache: the resident model's bits under every policy, and what the cache promises."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.expert_guesses import NextLayerForwardPass, load_around
from benchmarks.expert_policies import LeastRecent, OnDemand, Oracle
from benchmarks.expert_traces import RecordingPolicy, Trace
from tests.decode.runs import Result
from tests.parity.families import make
from tests.storage.experts.mixtures import FAMILIES, PROMPTS, MemoryExperts, answers, jitter, policies, streamed
from vivace.checkpoint.load import load_decoder
from vivace.core.cpu.backend import CpuBackend, pack_decoder
from vivace.core.cpu.span import MixtureSpan, NativeSpan
from vivace.core.model import Decoder
from vivace.errors import CapacityError, CheckpointError, CorruptError
from vivace.kernels.native import NativeBody
from vivace.storage.budget import chosen_experts, plan_memory
from vivace.storage.convert import write_store
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.experts.policy import NextUse, Policy
from vivace.storage.experts.store import StoredExperts
from vivace.storage.io.probing import open_reader
from vivace.storage.loading import load_stored

POLICIES = 5


@dataclass(frozen=True)
class Mixture:
    folder: Path
    resident: Decoder
    plain: list[Result]
    trace: Trace

    @property
    def num_experts(self) -> int:
        assert self.resident.config.moe is not None
        layers = sum(map(self.resident.config.is_moe, range(self.num_layers)))
        return self.resident.config.moe.num_experts * layers

    @property
    def num_layers(self) -> int:
        return self.resident.config.num_layers


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder)
    resident = load_decoder(folder)
    recording = RecordingPolicy(LeastRecent(), resident.config.num_layers)
    with ExpertCache(MemoryExperts(resident), recording, resident.config.num_layers, 64) as cache:
        answers(streamed(folder, cache, resident))
        yield Mixture(folder, resident, answers(resident), recording.trace)


def run(
    mixture: Mixture, policy: Policy, num_slots: int, *, seed: int = 0, guesses: int = 0, chunk_bytes: int = 4096
) -> tuple[ExpertCache, MemoryExperts, list[Result]]:
    store = MemoryExperts(mixture.resident, jitter(seed))
    cache = ExpertCache(store, policy, mixture.num_layers, num_slots, chunk_bytes=chunk_bytes)
    with cache:
        model = streamed(mixture.folder, cache, mixture.resident)
        found = answers(model, NextLayerForwardPass(guesses) if guesses else None)
        deadline = time.monotonic() + 5  # closing the cache gives up what was loaded ahead of a text that has ended
        while cache.counts.loads * store.expert_bytes != store.num_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
        return cache, store, found


def next_use(mixture: Mixture) -> NextUse:
    assert mixture.resident.config.moe is not None
    return NextUse(mixture.num_layers, mixture.resident.config.moe.num_experts)


def same(found: list[Result], expected: list[Result]) -> bool:
    return [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in expected]


@pytest.mark.parametrize("number", range(POLICIES))
@pytest.mark.parametrize("num_slots", [1, 5])
def test_every_policy_and_size_gives_the_resident_bits(mixture: Mixture, number: int, num_slots: int) -> None:
    policy = policies(mixture.trace, num_slots)[number]
    cache, store, found = run(mixture, policy, num_slots, seed=number, guesses=2 * isinstance(policy, NextUse))
    assert same(found, mixture.plain)
    assert cache.counts.loads * store.expert_bytes == store.num_bytes, "every load is read once, to its end"
    assert cache.counts.uses == sum(len(visit.chosen) for visit in mixture.trace.visits)


def test_routers_see_what_they_see_in_the_resident_model(mixture: Mixture) -> None:
    recording = RecordingPolicy(next_use(mixture), mixture.num_layers)
    run(mixture, recording, 4, guesses=3)
    assert recording.trace.visits == mixture.trace.visits


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_the_cost_model_counts_distinct_experts(mixture: Mixture, num_rows: int) -> None:
    config = mixture.resident.config
    assert config.moe is not None
    draw, layers = random.Random(0), sum(map(config.is_moe, range(config.num_layers)))
    experts = range(config.moe.num_experts)
    sizes = [
        len({expert for _ in range(num_rows) for expert in draw.sample(experts, config.moe.top_k)}) for _ in range(4000)
    ]
    assert chosen_experts(config, num_rows) == pytest.approx(layers * sum(sizes) / len(sizes), rel=0.02)
    assert chosen_experts(config, 1) == pytest.approx(layers * config.moe.top_k)


def test_drafting_pays_less_where_experts_are_read(mixture: Mixture, tmp_path: Path) -> None:
    store = write_store(mixture.folder, tmp_path / "store")
    whole = plan_memory(store, None, 64)
    some = plan_memory(store, int(0.8 * whole.num_bytes), 64)
    assert some.num_experts < len(some.streamed)
    assert some.pass_bytes(store, 1) < some.pass_bytes(store, 4) < 4 * some.pass_bytes(store, 1)
    gains = [
        plan.expected(store, 1e-6, 1.0, num_rows=4, tokens=2.0) / plan.expected(store, 1e-6, 1.0)
        for plan in (some, plan_memory(store, None, 64))
    ]
    assert gains[0] < 2.0
    assert gains[0] <= gains[1]
    assert whole.expected(store, 1.0, 1.0) > 1e9 / whole.total_bytes, "experts that are not chosen cost nothing"


def test_a_cache_of_everything_reads_everything_once(mixture: Mixture) -> None:
    chosen = {key for visit in mixture.trace.visits for key in visit.keys(mixture.num_layers)}
    for policy in (LeastRecent(), next_use(mixture)):
        cache, _, _ = run(mixture, policy, mixture.num_experts)
        assert cache.counts.loads == len(chosen)


def test_without_a_cache_every_use_is_a_read(mixture: Mixture) -> None:
    cache, _, _ = run(mixture, OnDemand(), 4)
    assert cache.counts.misses == cache.counts.uses == cache.counts.loads


def test_least_recent_hits_are_those_of_ten_lines(mixture: Mixture) -> None:
    num_slots, hits = 6, 0
    cached: list[tuple[int, int]] = []
    for visit in mixture.trace.visits:
        keys = visit.keys(mixture.num_layers)
        hits += sum(key in cached for key in keys)
        cached = [key for key in cached if key not in keys] + keys
        cached = cached[-num_slots:]
    if mixture.trace.widest <= num_slots:
        cache, _, _ = run(mixture, LeastRecent(), num_slots)
        assert cache.counts.hits == hits


def test_the_oracle_misses_less_than_any(mixture: Mixture) -> None:
    oracle, _, _ = run(mixture, Oracle(mixture.trace), 4)
    lru, _, _ = run(mixture, LeastRecent(), 4)
    assert oracle.counts.misses < lru.counts.misses


def test_a_prompt_runs_in_waves_and_reads_each_expert_once(mixture: Mixture) -> None:
    store = MemoryExperts(mixture.resident)
    with ExpertCache(store, LeastRecent(), mixture.num_layers, 2) as cache:
        first = next(i for i in range(mixture.num_layers) if mixture.resident.config.is_moe(i))
        fetched = [expert for expert, _ in cache.fetch(first, [0, 1, 2, 3], is_prompt=False)]
        assert sorted(fetched) == [0, 1, 2, 3]
        assert cache.counts.loads == 4
        assert len({key for key, *_ in store.reads}) == 4


@pytest.mark.parametrize("num_slots", [3, 5, 7])
def test_sorting_fewer_candidates_changes_no_eviction(
    mixture: Mixture, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts over many experts use the candidates up; then all experts are sorted."""
    loads = []
    for count in (1, 64):
        monkeypatch.setattr("vivace.storage.experts.slots.CANDIDATES", count)
        loads.append(run(mixture, LeastRecent(), num_slots)[0].counts.loads)
    assert loads[0] == loads[1]


def test_prefetches_never_evict_what_runs(mixture: Mixture) -> None:
    with ExpertCache(MemoryExperts(mixture.resident), next_use(mixture), mixture.num_layers, 1) as cache:
        fetching = cache.fetch(0, [1], is_prompt=False)
        _, expert = next(fetching)
        before = expert.up.weight.clone()  # type: ignore[attr-defined]
        cache.prefetch(2, [0, 1, 2, 3])
        threading.Event().wait(0.02)
        assert torch.equal(expert.up.weight, before)  # type: ignore[attr-defined]
        assert [number for number, _ in fetching] == []


def test_prefetches_are_counted(mixture: Mixture) -> None:
    with ExpertCache(MemoryExperts(mixture.resident), next_use(mixture), mixture.num_layers, 8) as cache:
        list(cache.fetch(0, [0], is_prompt=False))
        cache.prefetch(2, [1, 2])
        wait_until(lambda: cache.counts.loads == 3 and cache.is_idle)
        list(cache.fetch(2, [1, 3], is_prompt=False))
    assert (cache.counts.prefetched, cache.counts.misses, cache.counts.wasted) == (1, 2, 1)


def test_what_is_used_last_by_the_forecast_is_evicted_first(mixture: Mixture) -> None:
    with ExpertCache(MemoryExperts(mixture.resident), next_use(mixture), mixture.num_layers, 3) as cache:
        list(cache.fetch(0, [0, 1, 2], is_prompt=False))
        assert mixture.resident.config.moe is not None
        cache.predict_reuse(0, [1.5, 9.0, 2.5, *[4.0] * (mixture.resident.config.moe.num_experts - 3)])
        list(cache.fetch(2, [0], is_prompt=False))
        list(cache.fetch(0, [0, 2], is_prompt=False))
        assert (cache.counts.hits, cache.counts.misses) == (2, 4)
        list(cache.fetch(0, [1], is_prompt=False))
    assert cache.counts.misses == 5


def test_a_prediction_that_is_withdrawn_is_not_read(mixture: Mixture) -> None:
    gate = threading.Event()
    store = MemoryExperts(mixture.resident, lambda: float(not gate.wait(5)))
    with ExpertCache(store, next_use(mixture), mixture.num_layers, 8, num_threads=1, chunk_bytes=4096) as cache:
        cache.prefetch(0, [0, 1, 2, 3])
        cache.prefetch(2, [0, 1, 2, 3])
        cache.prefetch(2, [3, 0])
        gate.set()
        wait_until(lambda: cache.is_idle)
        begun = {key for key, *_ in store.reads}
    assert begun == {(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 3)}


def test_a_demand_overtakes_prefetches(mixture: Mixture) -> None:
    gate = threading.Event()
    store = MemoryExperts(mixture.resident, lambda: float(not gate.wait(5)))
    with ExpertCache(store, next_use(mixture), mixture.num_layers, 8, num_threads=1) as cache:
        cache.prefetch(2, [0, 1, 2])
        wait_until(lambda: len(store.asked) == 1)
        fetching = cache.fetch(0, [3], is_prompt=False)
        threading.Timer(0.02, gate.set).start()
        list(fetching)
        wait_until(lambda: cache.is_idle and cache.counts.loads == 4)
    order = list(dict.fromkeys(key for key, *_ in store.reads))
    assert order[:2] == [(2, 0), (0, 3)]


@pytest.mark.parametrize("num_slots", [1, 8])
def test_a_broken_expert_is_an_error_and_the_cache_goes_on(mixture: Mixture, num_slots: int) -> None:
    store = MemoryExperts(mixture.resident)
    with ExpertCache(store, next_use(mixture), mixture.num_layers, num_slots) as cache:
        model = streamed(mixture.folder, cache, mixture.resident)
        store.broken = {(2, expert) for expert in range(3)}
        with pytest.raises(CheckpointError, match=r"of layer 2 could not be read: .*Input/output error"):
            answers(model)
        cache.prefetch(2, [0])  # a prefetch that fails raises nothing
        threading.Event().wait(0.02)
        store.broken = set()
        assert same(answers(model), mixture.plain)


@pytest.mark.parametrize("is_mended", [True, False])
@pytest.mark.parametrize("has_ended", [True, False])
def test_an_expert_is_read_again_if_its_read_from_before_failed(
    mixture: Mixture, has_ended: bool, is_mended: bool
) -> None:
    gate = threading.Event()

    def delay_s() -> float:
        gate.wait(5)
        if store.reads and is_mended:
            store.broken = set()
        return 0.0

    store = MemoryExperts(mixture.resident, delay_s)
    store.broken = {(2, 0)}
    with ExpertCache(store, next_use(mixture), mixture.num_layers, 8, num_threads=1) as cache:
        cache.prefetch(2, [0])
        threading.Timer(0.0 if has_ended else 0.02, gate.set).start()
        wait_until(lambda: len(store.reads if has_ended else store.asked) == 1)
        fetching = cache.fetch(2, [0], is_prompt=False)
        if is_mended:
            assert [number for number, _ in fetching] == [0]
        else:
            with pytest.raises(CheckpointError, match="expert 0 of layer 2 could not be read"):
                list(fetching)
    assert [key for key, *_ in store.reads] == [(2, 0)] * 2, "only the second read is an answer to the layer"


def test_no_slot_is_refused(mixture: Mixture) -> None:
    with pytest.raises(CapacityError, match="0 slots hold no expert of"):
        ExpertCache(MemoryExperts(mixture.resident), LeastRecent(), mixture.num_layers, 0)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to be")


def test_prompts_differ() -> None:
    assert len(set(map(len, PROMPTS))) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["direct", "buffered", "mmap"])
def test_a_store_gives_the_resident_bits_through_every_reader(mixture: Mixture, kind: str, tmp_path: Path) -> None:
    store = write_store(mixture.folder, tmp_path / "store")
    reader = open_reader(store.path, kind).reader
    with ExpertCache(StoredExperts(store, reader), next_use(mixture), mixture.num_layers, 5, chunk_bytes=4096) as cache:
        model = load_around(store, reader, cache)
        assert same(answers(model, NextLayerForwardPass(2)), mixture.plain)
    reader.close()


@pytest.mark.parametrize("share", [None, 0.7])
def test_native_kernels_run_experts_from_a_store(
    mixture: Mixture, body: NativeBody, share: float | None, tmp_path: Path
) -> None:
    store = write_store(mixture.folder, tmp_path / "store", dtype="bfloat16")
    moe = mixture.resident.config.moe
    assert moe is not None
    assert store.is_tiled == (moe.expert_width % 16 == 0)
    if not store.is_tiled:
        pytest.skip("experts that fill no whole tiles are PyTorch's")
    resident = load_decoder(mixture.folder, dtype="bfloat16")
    pack_decoder(resident, body)
    whole = plan_memory(store, None, 256).num_bytes
    budget = None if share is None else int(whole * share)
    model, storage = load_stored(store.folder, budget, reader="buffered", num_tokens=256, body=body)
    assert storage.experts is not None
    assert (storage.experts.num_slots < len(storage.plan.streamed)) == (share is not None)
    assert isinstance(model.backend.span, MixtureSpan)
    assert type(resident.backend.span) is NativeSpan, "experts in memory are part of the native call"
    found = answers(model, NextLayerForwardPass(2))
    assert same(found, answers(resident))
    assert isinstance(model.backend, CpuBackend)
    model.backend.span = None
    assert same(answers(model), found), "layers one by one give the bits of the span"
    storage.close()


def test_a_store_that_ends_early_is_an_error_and_the_cache_goes_on(mixture: Mixture, tmp_path: Path) -> None:
    store = write_store(mixture.folder, tmp_path / "store")
    reader = open_reader(store.path, "buffered").reader
    whole = store.path.read_bytes()
    with ExpertCache(StoredExperts(store, reader), LeastRecent(), mixture.num_layers, 5) as cache:
        model = load_around(store, reader, cache)
        with store.path.open("r+b") as file:
            file.truncate(store["layers.2.experts.0"].offset)
        with pytest.raises(CorruptError, match="ends early"):
            answers(model)
        with store.path.open("r+b") as file:
            file.write(whole)
        assert same(answers(model), mixture.plain)
    reader.close()

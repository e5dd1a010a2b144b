"""What is chosen for each prompt, and sequences in stages beside others: texts are those of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vivace
from tests.parallel.ranks import Ended, run_ranks
from tests.parallel.test_runahead import IDS, assert_same, read
from tests.parity.families import make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_config
from vivace.core.model import Decoder
from vivace.decode.session import Session
from vivace.errors import WorldError
from vivace.options import Options
from vivace.parallel import passes, pipeline
from vivace.parallel.auto import COUNTED, AutoPrefill
from vivace.parallel.partition import Costs
from vivace.parallel.runahead import WAYS, RunaheadPrefill
from vivace.parallel.staged import StagedSlots

multiprocess = pytest.mark.multiprocess
TOGETHER = {"parallel": "auto", "timeout": 30.0}
LONG = torch.randint(5, 90, (620,), generator=torch.Generator().manual_seed(2)).tolist()


def choosing(way_of: Callable[[int], str]) -> None:
    """Let prompts be read in the way that a function gives for their length; of a process that ends with the test."""
    AutoPrefill.way_for = lambda self, model, length, chunk: "one" if length <= chunk else way_of(length)  # type: ignore[method-assign]


def by_length(length: int) -> str:
    """A pipeline for most prompts, and others beside it."""
    return {599: "runahead", 598: "pipeline-gathered", 597: "one"}.get(length, "pipeline")


@multiprocess
def test_the_same_is_read_and_what_is_expected_is_said(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    make_checkpoint(tmp_path / "longer", context=512)

    def without_stages() -> Any:
        choosing(lambda _: "runahead")
        return read(tmp_path, "torch", "float32", TOGETHER)

    found, _ = run_ranks(2, without_stages)
    assert_same(found, alone)

    def told() -> Any:
        engine = vivace.load(tmp_path / "longer", kernels="torch", **TOGETHER)
        return [engine.request_for(IDS * times, Options(max_new_tokens=2)).prefill_reason for times in (1, 2)]

    (nothing, reason), _ = run_ranks(2, told)
    assert nothing is None, "one chunk is read by rank 0"
    assert "read by" in reason
    assert all(way in reason for way in ("one", "runahead", "sequence-causal", "pipeline-gathered", "tensor"))
    assert "expected a token one " in reason
    assert "needs --parallel pipeline" not in reason


@multiprocess
@pytest.mark.parametrize("way", ["one", "runahead", "sequence-causal", "pipeline-gathered", "pipeline"])
def test_prompts_are_read_in_the_way_that_is_expected_to_be_the_fastest(way: str, tmp_path: Path) -> None:
    """Whatever that is, entries and text are those of one process; what needs other weights is never taken."""
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    times = dict.fromkeys(("one", "runahead", "sequence-causal", "pipeline-gathered", "pipeline"), 2.0)

    def work() -> Any:
        taken = []
        read_in, read_chunks = RunaheadPrefill.read, pipeline.read_chunks

        def read_as_expected(self: RunaheadPrefill, *given: Any) -> None:
            taken.append(next(name for name, number in WAYS.items() if number == given[-1].way))
            read_in(self, *given)

        def read_in_chunks(*given: Any) -> None:
            taken.append("pipeline")
            read_chunks(*given)

        from vivace.parallel import auto

        AutoPrefill.expected_s = lambda *_: times | {way: 1.0, "tensor": 0.1}  # type: ignore[method-assign]
        AutoPrefill.decoding_s = lambda *_: {}  # type: ignore[method-assign]
        RunaheadPrefill.read = read_as_expected  # type: ignore[method-assign]
        auto.read_chunks = read_in_chunks
        return read(tmp_path, "torch", "float32", TOGETHER), taken

    (found, taken), _ = run_ranks(2, work)
    assert taken == ([] if way == "one" else [way])
    if way == "pipeline":  # entries of the first layers are on rank 1
        stage = pipeline.stage_of(0, 2, 3)
        places = slice(2 * stage[0], 2 * stage[1])
        assert found[1] == alone[1]
        assert all(map(torch.equal, found[0][places], alone[0][places]))
        assert not any(map(torch.equal, found[0][: 2 * stage[0]], alone[0][: 2 * stage[0]]))
    else:
        assert_same(found, alone)


def answers(folder: Path, kernels: str, dtype: str, together: dict[str, Any]) -> Any:
    """Answers to prompts of all kinds, in batches in which some lie in stages and others do not."""
    if together:
        choosing(by_length)
    engine = vivace.load(folder, kernels=kernels, dtype=dtype, **together)
    prompts: list[Any] = [LONG[:600], LONG[:580], LONG[3:20], LONG[5:603], LONG[1:600], LONG[2:590]]
    found: list[Any] = []
    for options in (
        {"method": "plain", "do_sample": False},
        {"method": "plain", "do_sample": True, "temperature": 0.9, "seed": 5},
        {"method": "lookup", "do_sample": False},
        {"method": "plain", "do_sample": False, "exact": True},
        {"method": "plain", "do_sample": False, "num_beams": 3},
    ):
        results = engine.generate(prompts, max_new_tokens=10, ignore_eos=True, batch_size=3, **options)
        found += [result.token_ids for result in results]
    found.append(engine.generate([LONG[:580]], max_new_tokens=6, ignore_eos=True, logprobs=True)[0].logprobs)
    return found


@multiprocess
@pytest.mark.parametrize(
    ("count", "kernels", "dtype"), [(2, "torch", "float32"), (2, "auto", "bfloat16"), (3, "auto", "bfloat16")]
)
def test_staged_sequences_and_others_share_batches(count: int, kernels: str, dtype: str, tmp_path: Path) -> None:
    """Greedy, drawn, looked up, padded and in beams: each has the tokens that it has on one machine."""
    make_checkpoint(tmp_path, context=640, layers=4)
    alone = answers(tmp_path, kernels, dtype, {})
    led, *followed = run_ranks(count, answers, tmp_path, kernels, dtype, TOGETHER)
    assert led == alone
    assert [each.status for each in followed] == [0] * (count - 1)


@multiprocess
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_windows_and_learned_positions_in_stages(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})

    def work() -> Any:
        choosing(lambda _: "pipeline")
        return read(tmp_path, "torch", "float32", TOGETHER)[1]

    led, _ = run_ranks(2, work)
    assert led == alone[1]


def session_texts(folder: Path, together: dict[str, Any]) -> Any:
    """Texts of a session: a staged one that is forked, one that is cancelled, and one that takes its slot."""
    if together:
        choosing(lambda _: "pipeline")
    engine = vivace.load(folder, kernels="torch", **together)
    session = Session(engine.model, num_slots=3, capacity=640)
    options = Options(method="plain", max_new_tokens=14, ignore_eos=True, do_sample=False)
    texts: dict[int, list[int]] = {}

    def step() -> None:
        for one in session.step():
            texts.setdefault(one.request_id, []).extend(one.tokens)

    first, second = (session.admit(engine.request_for(prompt, options)) for prompt in (LONG[:600], LONG[7:500]))
    while len(texts.get(first, ())) < 3 or len(texts.get(second, ())) < 2:
        step()
    forked = session.fork(first)
    session.cancel(second)
    third = session.admit(engine.request_for(LONG[4:550], options))
    fourth = session.admit(engine.request_for(LONG[4:30], options))
    while session._live or session._waiting:
        step()
    return [texts[each] for each in (first, forked, third, fourth)], sorted(session.cache.staged)


@multiprocess
def test_forks_cancels_and_slots_that_are_taken_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, context=640, layers=3)
    alone = session_texts(tmp_path, {})
    led, _ = run_ranks(2, session_texts, tmp_path, TOGETHER)
    assert led == alone
    assert led[0][0][3:] == led[0][1], "a fork goes on as its source does"


def drained(session: Session) -> dict[int, list[int]]:
    """The texts of all requests of a session, none of which fails."""
    texts: dict[int, list[int]] = {}
    for one in session.drain():
        assert one.error is None, one.error
        texts.setdefault(one.request_id, []).extend(one.tokens)
    return texts


@multiprocess
def test_a_pass_that_fails_is_run_again_for_each(tmp_path: Path) -> None:
    """The other ranks go back as well; a slot that was rank 0's alone is staged afterwards."""
    make_checkpoint(tmp_path, context=640, layers=3)

    def work(together: dict[str, Any]) -> Any:
        if together:
            choosing(lambda length: "one" if length == 399 else "pipeline")
        engine = vivace.load(tmp_path, kernels="torch", **together)
        session = Session(engine.model, num_slots=2, capacity=640)
        options = Options(method="plain", max_new_tokens=6, ignore_eos=True, do_sample=False)
        longer = replace(options, max_new_tokens=30)
        for prompt, how in ((LONG[:400], options), (LONG[7:500], longer), (LONG[2:550], options)):
            session.admit(engine.request_for(prompt, how))
        greedy, calls = engine.model.greedy, []

        def failing(*given: Any, **named: Any) -> Any:
            calls.append(len(given[0]))
            if calls == [1, 2, 2] or calls == [2, 2]:
                raise RuntimeError("once")
            return greedy(*given, **named)

        engine.model.greedy = failing  # type: ignore[method-assign]
        texts = drained(session)
        assert 1 in calls[2:], "it has failed"
        return texts

    led, _ = run_ranks(2, work, TOGETHER)
    assert led == work({})


@multiprocess
def test_pruned_prompts_beside_staged_ones(tmp_path: Path) -> None:
    """A prompt that is pruned is rank 0's alone, whatever else is running."""
    make_checkpoint(tmp_path, context=640, layers=4)

    def work(together: dict[str, Any]) -> Any:
        if together:
            choosing(lambda _: "pipeline")
        engine = vivace.load(tmp_path, kernels="torch", **together)
        session = Session(engine.model, num_slots=2, capacity=640)
        options = Options(method="plain", max_new_tokens=8, ignore_eos=True, do_sample=False)
        pruned = replace(options, prefill="lazy", min_prompt=1)
        for prompt, how in ((LONG[:500], options), (LONG[:450], pruned)):
            session.admit(engine.request_for(prompt, how))
        return drained(session)

    led, _ = run_ranks(2, work, TOGETHER)
    assert led == work({})


@multiprocess
def test_a_rank_that_dies_while_a_staged_text_is_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, context=640, layers=3)

    def work() -> str:
        choosing(lambda _: "pipeline")
        if os.environ["RANK"] == "1":
            unpack, count = passes.unpack_pass, [0]

            def counted(*given: Any) -> Any:
                count[0] += 1
                return os._exit(9) if count[0] > 6 else unpack(*given)

            passes.unpack_pass = counted
        try:
            engine = vivace.load(tmp_path, kernels="torch", **TOGETHER)
            engine.generate([LONG[:600]], max_new_tokens=20, ignore_eos=True, method="plain")
        except WorldError as error:
            return str(error)
        return "nothing happened"

    first, second = run_ranks(2, work)
    assert first == "rank 1 has ended"
    assert isinstance(second, Ended)
    assert second.status == 9


@multiprocess
def test_decoding_is_measured_as_it_is_chosen(tmp_path: Path) -> None:
    """Rank 1 takes its time for its layers: that shows in stages, and not on rank 0 alone."""
    make_checkpoint(tmp_path, context=640, layers=3)

    def work() -> Any:
        if os.environ["RANK"] == "1":
            run = Decoder.run

            def slowly(*given: Any, **named: Any) -> Any:
                time.sleep(0.05)
                return run(*given, **named)

            Decoder.run = slowly  # type: ignore[method-assign] - of a process that ends with the test
        engine = vivace.load(tmp_path, kernels="torch", **TOGETHER)
        prefill = engine.prefills._full
        return prefill.token_s, prefill.decoding_s(engine.model)

    (measured, told), _ = run_ranks(2, work)
    assert measured["one"] < 0.05 < measured["pipeline"]
    assert measured.items() <= told.items()
    assert set(told) == {"one", "pipeline", "tensor"}


def prefill_of(folder: Path, num_ranks: int = 2) -> tuple[AutoPrefill, Any]:
    model: Any = SimpleNamespace(config=load_config(folder), backend=SimpleNamespace(span=None))
    world: Any = SimpleNamespace(size=num_ranks)
    prefill = AutoPrefill(world)
    prefill.costs = prefill.alone = replace(Costs.of(model.config), step_s=1e-3)
    return prefill, model


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3_moe", 2), ("llama", 5)])
def test_nothing_is_expected_of_ways_that_would_be_refused(family: str, num_ranks: int, tmp_path: Path) -> None:
    """Experts are not shared, and three layers are no five stages: the reason would send people to an error."""
    make(family).save_pretrained(tmp_path)
    prefill, model = prefill_of(tmp_path, num_ranks)
    reason = prefill.reason_for(model, 2049)
    assert reason is not None
    assert "pipeline-gathered" in reason
    assert "pipeline " not in reason
    assert "needs --parallel" not in reason
    assert "tensor" not in reason


def test_a_pipeline_is_taken_where_it_gains_more_than_decoding_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("llama").save_pretrained(tmp_path)
    prefill, model = prefill_of(tmp_path)
    expected = {"one": 3.0, "runahead": 2.0, "pipeline": 1.9, "tensor": 1.0}
    assert prefill.chosen(model, expected) == "runahead", "the model cannot be run in stages"
    monkeypatch.setattr("vivace.parallel.auto.staged_leader", lambda _: object())
    for loss, way in ((0.11, "runahead"), (0.09, "pipeline")):
        steps = {"one": 0.02, "pipeline": 0.02 + loss / COUNTED}
        monkeypatch.setattr(AutoPrefill, "decoding_s", lambda *_, found=steps: found)
        assert prefill.chosen(model, expected) == way
    monkeypatch.setattr(AutoPrefill, "expected_s", lambda *_: expected)
    reason = prefill.reason_for(model, 2049)
    assert reason is not None
    assert reason.startswith("read by pipeline; expected one 3.00 s, runahead 2.00 s")
    assert "; decoded by pipeline, expected a token one 20.0 ms, pipeline 20.7 ms" in reason
    assert reason.endswith("; tensor needs --parallel tensor")


def test_a_way_that_decodes_sooner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama").save_pretrained(tmp_path)
    prefill, model = prefill_of(tmp_path)
    expected = {"one": 3.0, "runahead": 2.0, "tensor": 2.1}
    monkeypatch.setattr(AutoPrefill, "expected_s", lambda *_: expected)
    for tensor_s, is_named in ((0.019, True), (0.021, False)):
        steps = {"one": 0.02, "tensor": tensor_s}
        monkeypatch.setattr(AutoPrefill, "decoding_s", lambda *_, found=steps: found)
        reason = prefill.reason_for(model, 2049)
        assert reason is not None
        assert ("--parallel runahead-tensor" in reason) == is_named


def test_the_other_ranks_are_told_of_staged_sequences_only() -> None:
    told: list[tuple[int, ...]] = []
    numbered: list[Any] = []
    leader: Any = SimpleNamespace(
        number_of=lambda cache: numbered.append(cache) or 7,
        tell=lambda *given: told.append(given),
        world=SimpleNamespace(has_ended=False),
    )
    cache: Any = SimpleCache(lengths=[30, 20, 10], staged={1})
    slots = StagedSlots(leader, cache)
    slots.commit([0, 2], [[0], [0]])
    slots.truncate([0], [4])
    slots.fork([0], [2])
    assert not told
    assert not numbered, "the others need no cache yet"
    slots.commit([0, 1], [[0], [0, 1]])
    slots.truncate([1, 0], [5, 6])
    slots.restore(slots.saved())
    slots.fork([1], [2])
    assert cache.staged == {1, 2}
    slots.release([0, 1])
    assert told == [
        (passes.COMMIT, 7, *passes.pack_lists([[1], [0, 1]])),
        (passes.TRUNCATE, 7, *passes.pack_lists([[1], [5]])),
        (passes.RESTORE, 7, 0, 20, 0),
        (passes.FORK, 7, *passes.pack_lists([[1], [2]])),
        (passes.RELEASE, 7, 1),
    ]
    assert cache.staged == {2}
    slots.release([2])
    slots.restore((0, 0, 0))
    assert len(told) == 6
    assert not cache.staged


class SimpleCache(SimpleNamespace):
    """Can be referred to weakly."""

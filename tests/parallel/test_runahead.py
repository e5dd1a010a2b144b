"""A prompt that several ranks have read leaves the entries and the text of one that a single process has read."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.parallel.ranks import Ended, run_ranks
from tests.parallel.sessions import entries_and_texts
from tests.parity.families import make
from vivace.decode.session import Session
from vivace.errors import UnsupportedError, WorldError
from vivace.options import Options
from vivace.parallel import exchange, runahead
from vivace.parallel.links import Links
from vivace.parallel.partition import entries_sent
from vivace.parallel.runahead import RunaheadPrefill

pytestmark = pytest.mark.multiprocess

CHUNK = 16
TOGETHER = {"parallel": "runahead", "timeout": 30.0}
IDS = torch.randint(0, 97, (171,), generator=torch.Generator().manual_seed(1)).tolist()


def read(folder: Path, kernels: str, dtype: str, together: dict[str, Any], counts: list[int] | None = None) -> Any:
    """Entries of a prompt, what is decoded after it and beside it.

    Args:
        folder: of the checkpoint.
        kernels: that compute.
        dtype: of the weights.
        together: arguments of ``vivace.load`` for ranks.
        counts: lengths of the pieces; None balances them.
    """
    engine = vivace.load(folder, kernels=kernels, dtype=dtype, **together)
    if counts is not None:
        prefill = engine.prefills._full
        assert isinstance(prefill, RunaheadPrefill)
        prefill.counts = lambda *_: counts  # type: ignore[method-assign]
    session = Session(engine.model, num_slots=2, capacity=256, chunk=CHUNK)
    options = Options(method="plain", max_new_tokens=12, ignore_eos=True)
    for prompt in (IDS, IDS[:9]):
        session.admit(engine.request_for(prompt, options))
    return entries_and_texts(session, len(IDS), 2)


def assert_same(led: Any, alone: Any) -> None:
    assert led[1] == alone[1]
    assert len(led[0]) == len(alone[0])
    for ours, theirs in zip(led[0], alone[0], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow_where(lambda family, kernels, dtype: kernels == "auto" and family not in ("gemma3_text", "gpt2"))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2", "phi3", "gpt2"])
@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "float32"), ("auto", "bfloat16")])
def test_entries_and_text_are_those_of_one_process(family: str, kernels: str, dtype: str, tmp_path: Path) -> None:
    """Sliding windows, embeddings that rotate long prompts otherwise, and learned positions are among them."""
    make(family).save_pretrained(tmp_path)
    alone = read(tmp_path, kernels, dtype, {})
    led, *followed = run_ranks(3, read, tmp_path, kernels, dtype, TOGETHER)
    assert_same(led, alone)
    assert [each.status for each in followed] == [0, 0]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", ["sequence-causal", "sequence", "pipeline-gathered"])
def test_gathered_entries_are_those_of_one_process(way: str, count: int, tmp_path: Path) -> None:
    """Where every row attends to the whole prompt and is masked, sums have other terms, all of them zero."""
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    led, *followed = run_ranks(count, read, tmp_path, "torch", "float32", {**TOGETHER, "parallel": way})
    assert led[1] == alone[1]
    if way != "sequence":
        assert_same(led, alone)
    for ours, theirs in zip(led[0], alone[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert [each.status for each in followed] == [0] * (count - 1)


def test_stages_of_native_kernels_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "auto", "bfloat16", {})
    led, _ = run_ranks(2, read, tmp_path, "auto", "bfloat16", {**TOGETHER, "parallel": "pipeline-gathered"})
    assert_same(led, alone)


def test_gathering_is_refused_where_layers_forget(tmp_path: Path) -> None:
    make("gemma3_text").save_pretrained(tmp_path)

    def work() -> Any:
        try:
            read(tmp_path, "torch", "float32", {**TOGETHER, "parallel": "sequence"})
        except UnsupportedError as error:
            return str(error)
        return "nothing happened"

    first, second = run_ranks(2, work)
    assert "sliding windows" in first
    assert isinstance(second, Ended)
    assert second.status not in (0, None)


def test_costs_are_of_the_slowest_rank_while_all_compute(tmp_path: Path) -> None:
    """Rank 1 takes long for what it computes: that shows in what ranks cost together, not in what one costs alone."""
    make("llama").save_pretrained(tmp_path)
    measured = runahead.rank_times

    def work() -> Any:
        if os.environ["RANK"] == "1":
            runahead.rank_times = lambda *given, **named: measured(*given, **named) + 7.0
        engine = vivace.load(tmp_path, **TOGETHER)
        return engine.prefills._full.costs, engine.prefills._full.alone

    (together, alone), _ = run_ranks(2, work)
    assert together.project_s > 7
    assert together.step_s > 7
    assert len(together.attention) == len(alone.attention) >= 2
    assert all(seconds > 7 for _, seconds in together.attention)
    assert together.sum_s > 7
    assert together.entry_work_s > 7, "of some bytes"
    assert (alone.sum_s, alone.sum_step_s, alone.entry_work_s) == (0, 0, 0)
    assert 0 < alone.project_s < 7
    assert 0 < alone.step_s < 7


def late(*args: Any) -> Any:
    """The same over links that take their time."""
    send, numbers = Links.send, random.Random(int(os.environ["RANK"]))

    def sent(*given: Any, **named: Any) -> None:
        time.sleep(numbers.random() * 0.02)
        send(*given, **named)

    Links.send = sent  # type: ignore[method-assign] - of a process that ends with the test
    return read(*args)


@pytest.mark.parametrize("counts", [[16, 154], [160, 10], [32, 16, 122], [48, 64, 48, 10]])
def test_any_partition_on_the_grid_and_late_links(counts: list[int], tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    led, *_ = run_ranks(len(counts), late, tmp_path, "torch", "float32", TOGETHER, counts)
    assert_same(led, alone)


def test_eight_ranks_do_not_wait_for_one_another_for_ever(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    led, *_ = run_ranks(8, late, tmp_path, "torch", "float32", TOGETHER)
    assert_same(led, alone)


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """Each rank but the last sends its prefix and its own entries, once per layer."""
    make("llama").save_pretrained(tmp_path)
    counts = [64, 64, 42]

    def sent() -> Any:
        run, seen = runahead.run_piece, []

        def watched(world: Any, decoder: Any, *args: Any) -> None:
            run(world, decoder, *args)
            seen[:] = [world.links, decoder.config]

        runahead.run_piece = watched
        with suppress(SystemExit):
            read(tmp_path, "torch", "float32", TOGETHER, counts)
        return sum(size for (_, purpose), size in seen[0].sent.items() if purpose == "entries"), seen[1]

    found = run_ranks(3, sent)
    config = found[0][1]
    entry = 2 * config.num_kv_heads * config.head_dim * 4 * config.num_layers
    assert [size for size, _ in found] == [0, 64 * entry, 128 * entry]
    assert sum(size for size, _ in found) == entries_sent(counts) * entry


def test_a_rank_that_dies_while_it_reads(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)

    def work() -> str:
        if os.environ["RANK"] == "1":
            exchange.entries_of = lambda *_: os._exit(9)
        try:
            read(tmp_path, "torch", "float32", TOGETHER)
        except WorldError as error:
            return str(error)
        return "nothing happened"

    first, *others = run_ranks(3, work)
    assert first == "rank 1 has ended"
    assert [other.status for other in others] == [9, 1]


def test_pieces_are_balanced_for_the_machine(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)

    def work() -> Any:
        engine = vivace.load(tmp_path, **TOGETHER)
        return engine.prefills._full.costs, engine.world.link

    (costs, link), _ = run_ranks(2, work)
    assert 0 < link.latency_s < 1
    assert link.bytes_per_s > 1e6
    assert min(costs.project_s, costs.feed_s, costs.attend_s, costs.entry_s) > 0
    assert costs.num_layers == 3


def test_methods_that_read_the_prompts_residuals_are_refused() -> None:
    """The model that ships has weights for some; auto chooses among the others."""

    def work() -> Any:
        engine = vivace.load(parallel="runahead", timeout=30.0)
        ids = IDS * 4
        answer = engine.generate(ids, max_new_tokens=8, ignore_eos=True)[0]
        found = []
        for method in ("multirate", "eagle"):
            try:
                engine.generate(ids, method=method)
            except UnsupportedError as error:
                found.append(str(error))
        return found, answer.token_ids, engine.methods.ready()

    (found, tokens, ready), _ = run_ranks(2, work)
    assert [line.endswith("it is for one machine; plain, lookup and draft run on several ranks") for line in found] == [
        True,
        True,
    ]
    assert ready == ["plain", "lookup", "draft"]
    alone = vivace.load().generate(IDS * 4, max_new_tokens=8, ignore_eos=True, method="plain")[0]
    assert tokens == alone.token_ids

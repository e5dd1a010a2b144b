"""Prompts that are read along a chain leave every rank the heads with which it decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.parallel.ranks import Ended, run_ranks
from tests.parallel.sessions import entries_and_texts
from tests.parallel.test_failures import is_rank, message
from tests.parity.families import CONFIGS, make
from vivace.decode.session import Session
from vivace.options import Options
from vivace.parallel.scattered import ScatteredPrefill
from vivace.parallel.shares import shares_of

pytestmark = pytest.mark.multiprocess

CHUNK = 16
TOGETHER = {"parallel": "runahead-tensor", "timeout": 30.0}
IDS = torch.randint(0, 97, (171,), generator=torch.Generator().manual_seed(1)).tolist()
DENSE = sorted(set(CONFIGS) - {"mixtral", "olmoe", "qwen3_moe"})


def read(folder: Path, kernels: str, dtype: str, together: dict[str, Any], kv: str = "same") -> Any:
    """Entries of a long prompt on this rank, the texts behind it and two others, and what rank 0 sent."""
    engine = vivace.load(folder, kernels=kernels, dtype=dtype, kv=kv, **together)
    ids = IDS[: engine.model.config.max_positions - 16]
    session = Session(engine.model, num_slots=3, capacity=256, chunk=CHUNK)
    plain = Options(method="plain", max_new_tokens=12, ignore_eos=True)
    drawn = Options(method="lookup", max_new_tokens=8, temperature=0.9, seed=3, ignore_eos=True)
    for prompt, options in ((ids, plain), (ids[:9], plain), (ids[30:], drawn), (ids[:1], plain)):
        session.admit(engine.request_for(prompt, options))
    entries, texts = entries_and_texts(session, len(ids), 4)
    return entries, texts, None if engine.world is None else engine.world.traffic


@pytest.mark.parametrize("family", DENSE)
def test_heads_are_those_of_one_process_and_texts_too(family: str, tmp_path: Path) -> None:
    """The chain has the bits of one process; sums of float32 parts leave the same texts."""
    model = make(family)
    model.save_pretrained(tmp_path)
    alone = read(tmp_path, "torch", "float32", {})
    led, followed = run_ranks(2, read, tmp_path, "torch", "float32", TOGETHER)
    first, stop = shares_of(vivace.load(tmp_path).model.config, 2)[0].kv_heads
    for ours, theirs in zip(led[0], alone[0], strict=True):
        assert torch.equal(ours, theirs[first:stop])
    assert led[1] == alone[1]
    assert followed.status == 0


@pytest.mark.slow_where(lambda count, kernels: (count, kernels) in ((3, "auto"), (4, "torch")))
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_more_ranks_than_key_value_heads(count: int, kernels: str, tmp_path: Path) -> None:
    make("qwen2").save_pretrained(tmp_path)
    alone = read(tmp_path, kernels, "float32", {})
    led, *followed = run_ranks(count, read, tmp_path, kernels, "float32", TOGETHER)
    assert led[1] == alone[1]
    assert [each.status for each in followed] == [0] * (count - 1)


def test_native_kernels_and_entries_in_eight_bits(tmp_path: Path) -> None:
    """The answers are those of ranks that read the prompt together, too, as its entries are."""
    make("llama").save_pretrained(tmp_path)
    alone = read(tmp_path, "auto", "bfloat16", {}, "int8")
    led, _ = run_ranks(2, read, tmp_path, "auto", "bfloat16", TOGETHER, "int8")
    first, stop = shares_of(vivace.load(tmp_path).model.config, 2)[0].kv_heads
    for ours, theirs in zip(led[0], alone[0], strict=True):
        assert torch.equal(ours, theirs[first:stop])
    assert led[1][0][0] == alone[1][0][0]


def test_a_rank_is_sent_what_it_has_not_read(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)

    def work() -> Any:
        engine = vivace.load(tmp_path, kernels="torch", dtype="float32", **TOGETHER)
        prefill = engine.prefills._full
        assert isinstance(prefill, ScatteredPrefill)
        prefill.counts = lambda *_: [96, 74]  # type: ignore[method-assign]
        session = Session(engine.model, num_slots=1, capacity=256, chunk=CHUNK)
        session.admit(engine.request_for(IDS, Options(method="plain", max_new_tokens=1)))
        list(session.drain())
        assert engine.world is not None
        return engine.world.traffic["1"]["heads"]

    sent, followed = run_ranks(2, work)
    assert isinstance(followed, Ended)
    config = vivace.load(tmp_path).model.config
    first, stop = shares_of(config, 2)[1].kv_heads
    entries = 74 * 2 * (stop - first) * config.head_dim
    assert sent == {"frames": config.num_layers, "bytes": config.num_layers * entries * 4}


def test_beams_cancels_and_slots_that_are_taken_again(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)

    def work(**together: Any) -> Any:
        engine = vivace.load(tmp_path, kernels="torch", dtype="float32", **together)
        beams = engine.generate([IDS, IDS[4:]], num_beams=3, max_new_tokens=6, do_sample=False)
        session = Session(engine.model, num_slots=2, capacity=256, chunk=CHUNK)
        plain = Options(method="plain", max_new_tokens=12, ignore_eos=True, do_sample=False)
        _, second = (session.admit(engine.request_for(ids, plain)) for ids in (IDS, IDS[7:]))
        texts: dict[int, list[int]] = {}
        while not texts.get(second):
            for one in session.step():
                texts.setdefault(one.request_id, []).extend(one.tokens)
        session.cancel(second)
        session.admit(engine.request_for(IDS[4:], plain))
        for one in session.drain():
            texts.setdefault(one.request_id, []).extend(one.tokens)
        return [one.token_ids for one in beams], texts

    led, _ = run_ranks(2, lambda: work(**TOGETHER))
    assert led == work()


def test_a_rank_that_dies_while_heads_arrive(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)

    def work() -> Any:
        import os

        from vivace.parallel import scattered

        if is_rank(1):
            scattered.copy_heads = lambda *_: os._exit(9)
        return message(lambda: read(tmp_path, "torch", "float32", TOGETHER))

    first, second = run_ranks(2, work)
    assert "rank 1 has ended" in first
    assert isinstance(second, Ended)
    assert second.status == 9

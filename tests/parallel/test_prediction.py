"""What ways to share a model would take, from costs of ranks and link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.test_shares import SMOLLM2
from vivace.parallel.partition import Costs, alone_s, even, first_token_s
from vivace.parallel.prediction import (
    ShareWork,
    decoding_times,
    prompt_times,
    share_work,
    staged_s,
    tensor_s,
)

COSTS = Costs(1e-6, 9e-6, 2e-8, 6)
CURVE = ((128.0, 1e-6), (1152.0, 3e-6), (3968.0, 14.264e-6))
"""Beyond 1,152 entries each one costs twice as much as before."""
HALVES = (ShareWork(0.5, 0.5, 0.05, 0.45),) * 2


def test_attention_is_added_up_between_the_lengths_that_were_measured() -> None:
    costs = replace(COSTS, attention=CURVE)
    assert costs.attention_s(256, 0) == pytest.approx(256 * 1e-6)
    assert costs.attention_s(256, 1024) == pytest.approx(256 * 3e-6)
    assert costs.attention_s(256, 512) == pytest.approx(256 * 2e-6)
    assert costs.attention_s(256, 7936 - 128) == pytest.approx(256 * (14.264e-6 + 4e-9 * 3968))
    pieces = costs.attention_s(1024, 0) + costs.attention_s(2048, 1024)
    assert costs.attention_s(3072, 0) == pytest.approx(pieces)
    assert COSTS.attention_s(100, 50) == pytest.approx(2e-8 * 100 * 100), "one coefficient where no more is known"
    masked = replace(COSTS, masked=((256.0, 1e-6), (1024.0, 4e-6)))
    assert masked.masked_s(10, 512) == pytest.approx(10 * 2e-6)


def test_steeper_attention_makes_last_pieces_later() -> None:
    steep, flat = replace(COSTS, attention=CURVE), replace(COSTS, attention=(CURVE[0], CURVE[1]))
    pieces = even(8192, 2, 256)
    assert first_token_s(pieces, steep) > 1.2 * first_token_s(pieces, flat)


def test_ranks_meet_twice_a_layer_so_uneven_heads_cost_more_than_their_sum() -> None:
    """Six and three query heads: columns make up for weights, but nobody goes on before the later one."""
    uneven = (ShareWork(2 / 3, 2 / 3, 0.1, 0.4), ShareWork(1 / 3, 1 / 3, 0.05, 0.45))
    work = alone_s(4096, COSTS)
    assert tensor_s(4096, COSTS, HALVES) == pytest.approx(work / 2)
    attention = 6 * COSTS.attention_s(4096, 0)
    assert tensor_s(4096, COSTS, uneven) > work / 2 + attention / 6
    slow = replace(COSTS, row_bytes_s=1e-4)
    assert tensor_s(4096, slow, HALVES) == pytest.approx(work / 2 + 6 * 2 * 4096 * 1e-4)
    summed = replace(slow, sum_s=3e-4)
    assert tensor_s(4096, summed, HALVES) == pytest.approx(work / 2 + 6 * 2 * 4096 * 3e-4), "as it was measured"


def test_parts_of_a_layer_add_up() -> None:
    works = share_work(SMOLLM2, 2)
    assert sum(work.attend for work in works) == pytest.approx(1)
    assert sum(work.project for work in works) == pytest.approx(1)
    assert sum(work.output + work.ffn for work in works) == pytest.approx(1)
    assert {round(work.attend, 3) for work in works} == {0.667, 0.333}
    most, least = sorted(works, key=lambda work: -work.attend)
    assert most.ffn < least.ffn


def test_stages_overlap_and_entries_bound_them_on_slow_links() -> None:
    free = staged_s(8192, 2, COSTS, gathers=False)
    work = alone_s(8192, COSTS)
    assert work / 2 < free < work / 2 * 1.1
    assert staged_s(8192, 2, COSTS, gathers=True) == free, "nothing that is sent takes time"
    slow = replace(COSTS, entry_s=1e-3)
    assert staged_s(8192, 2, slow, gathers=True) == pytest.approx(8192 * 3 * 1e-3, rel=0.1)
    assert staged_s(8192, 2, slow, gathers=False) == free


def test_what_entries_take_from_ranks_that_compute_is_counted() -> None:
    """In all layers but the last, behind whose entries no rank computes."""
    busy, layers = replace(COSTS, entry_work_s=1e-6), COSTS.num_layers - 1
    assert alone_s(1024, busy) == alone_s(1024, COSTS)
    two = first_token_s([512, 512], busy) - first_token_s([512, 512], COSTS)
    assert two == pytest.approx(layers * 512e-6), "one sends what the other receives"
    three = first_token_s([100, 800, 100], busy) - first_token_s([100, 800, 100], COSTS)
    assert three == pytest.approx(layers * (100 + 900) * 1e-6), "the one in the middle does both"
    assert staged_s(8192, 2, busy, gathers=False) == staged_s(8192, 2, COSTS, gathers=False)
    assert staged_s(8192, 2, busy, gathers=True) == pytest.approx(
        staged_s(8192, 2, replace(COSTS, feed_s=COSTS.feed_s + 1e-6), gathers=True)
    )


def test_one_rank_is_expected_by_costs_of_its_own() -> None:
    """Beside others that compute, everything takes three times as long: sharing by two is not worth it."""
    crowded = Costs(3e-6, 27e-6, 6e-8, 6)
    halves = even(8192, 2, 256)
    found = prompt_times(8192, halves, halves, crowded, COSTS, 2, HALVES)
    assert min(found, key=lambda way: found[way]) == "one"
    assert set(found) == {"one", "runahead", "sequence-causal", "pipeline-gathered", "pipeline", "tensor"}
    calm = prompt_times(8192, halves, halves, COSTS, COSTS, 2)
    assert "tensor" not in calm
    assert min(calm, key=lambda way: calm[way]) != "one"


def test_decoding_is_divided_only_where_messages_are_fast() -> None:
    step = replace(COSTS, step_s=1e-3)
    fast, slow = (replace(step, latency_s=latency) for latency in (1e-6, 1e-3))
    assert decoding_times(fast, step, 2, HALVES)["tensor"] < decoding_times(fast, step, 2, HALVES)["one"]
    assert decoding_times(slow, step, 2, HALVES)["tensor"] > decoding_times(slow, step, 2, HALVES)["one"]
    assert decoding_times(slow, step, 2, HALVES)["pipeline"] > 6e-3

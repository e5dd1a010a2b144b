from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from vivace.parallel.partition import Costs, balanced, busiest_square, entries_sent, even, first_token_s
from vivace.parallel.runahead import place_of

LONG = Costs(1e-6, 3e-6, 4e-9, 24)


def test_the_worked_example() -> None:
    """Nine tokens on three processes: 22 entries of keys and values against 36, and 21 products against 27."""
    counts = [4, 3, 2]
    assert [count * stop for count, stop in zip(counts, accumulate(counts), strict=True)] == [16, 21, 18]
    assert (2 * entries_sent(counts), 2 * (3 - 1) * 9) == (22, 36)
    assert (busiest_square(counts), busiest_square([3, 3, 3])) == (21, 27)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [2048, 4000, 8191])
def test_balanced_pieces_are_never_worse_and_get_shorter(num_ranks: int, length: int) -> None:
    equal, found = even(length, num_ranks, 64), balanced(length, num_ranks, 64, LONG)
    for counts in (equal, found):
        assert sum(counts) == length
        assert min(counts) > 0
        assert all(stop % 64 == 0 for stop in list(accumulate(counts))[:-1])
    assert first_token_s(found, LONG) <= first_token_s(equal, LONG)
    assert all(after <= before + 64 for before, after in pairwise(found))


def test_no_partition_beats_perfect_balance() -> None:
    """With attention alone and a free link a chain takes at least C^2/2 (1/p + 1/p^2) products of dense attention."""
    costs = Costs(0.0, 0.0, 1e-9, 32)
    for num_ranks in (2, 4):
        took = first_token_s(balanced(8192, num_ranks, 16, costs), costs)
        assert took >= 31 * 1e-9 * 8192**2 / 2 / num_ranks


def test_a_slow_link_gives_more_to_the_beginning() -> None:
    slow = Costs(1e-6, 3e-6, 4e-9, 24, latency_s=1e-4, entry_s=2e-5)
    free, bound = balanced(4096, 2, 64, LONG), balanced(4096, 2, 64, slow)
    assert first_token_s(bound, slow) < first_token_s(free, slow)
    assert bound[0] < free[0]


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 5])
def test_the_chain_ends_at_rank_0(num_pieces: int) -> None:
    counts = list(range(10, 10 + num_pieces))
    places = {rank: place_of(rank, counts) for rank in range(6)}
    assert [rank for rank, place in places.items() if place is not None] == list(range(num_pieces))
    at, rank = 0, next(rank for rank, place in places.items() if place is not None and place.sender is None)
    for count in counts:
        place = places[rank]
        assert place is not None
        assert (place.first, place.stop) == (at, at + count)
        at = place.stop
        if place.receiver is not None:
            following = places[place.receiver]
            assert following is not None
            assert following.sender == rank
            rank = place.receiver
    assert rank == 0

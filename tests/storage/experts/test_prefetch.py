"""The queue of predicted experts: the most urgent first, and nothing that is predicted no longer."""

from __future__ import annotations

from vivace.storage.experts.prefetch import PrefetchQueue


def drained(queue: PrefetchQueue) -> list[tuple[int, int]]:
    found = []
    while queue:
        key, *_ = queue.most_urgent()
        found.append(key)
        queue.drop(key)
    return found


def test_the_earliest_due_comes_first_then_the_lowest_rank() -> None:
    queue = PrefetchQueue()
    for key, due, rank in [((1, 0), 9, 0), ((0, 3), 8, 1), ((0, 2), 8, 0), ((2, 5), 7, 4)]:
        queue.add(key, due, rank)
    queue.add((1, 0), 8, 2)
    queue.add((2, 5), 11, 0)
    assert queue.most_urgent() == ((2, 5), 7, 4), "it keeps the urgency that is higher"
    assert drained(queue) == [(2, 5), (0, 2), (0, 3), (1, 0)]


def test_a_new_prediction_withdraws_the_rest_of_the_one_before() -> None:
    queue = PrefetchQueue()
    assert queue.replace(1, [4, 5, 6]) == []
    for rank, expert in enumerate([4, 5, 6]):
        queue.add((1, expert), 3, rank)
    queue.add((2, 4), 4, 0)
    assert queue.replace(1, [6, 7]) == [(1, 4), (1, 5)]
    assert drained(queue) == [(1, 6), (2, 4)]
    assert queue.replace(1, []) == [(1, 6), (1, 7)]


def test_what_has_run_waits_no_longer() -> None:
    queue = PrefetchQueue()
    for due in (3, 4, 5):
        queue.add((due, 0), due, 0)
    queue.drop_until(4)
    assert drained(queue) == [(5, 0)]

"""Which piece of a prompt each rank reads in KV-Runahead, and what a partition costs (Cho et al. 2024, 2405.05329).

Rank i of the chain has ``c_i`` tokens behind a prefix of ``o_i = c_0 + ... + c_(i-1)``. Its attention computes
``c_i (o_i + c_i)`` products where it is dense and ``c_i o_i + c_i^2 / 2`` where it is causal, as here. Later pieces see
more tokens, so that balanced pieces get shorter along the chain. A layer of a rank can attend when its own keys and the
prefix are there:

    ready[i, l]   = begun[i, l] + project(c_i)
    arrived[i, l] = max(passed[i-1, l], arrived[i, l-1]) + latency + bytes(o_i) / bandwidth
    passed[i, l]  = max(ready[i, l], arrived[i, l])
    begun[i, l+1] = passed[i, l] + attend(c_i, o_i) + feed(c_i) + work(entries received and sent)

The paper searches on the machine; boundaries here are searched in this model, from the even split and from a balance of
work, since sweeps that start at the even split alone stop before the best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vivace.core.config import ModelConfig

PORTION = 256
"""Tokens that are taken to see equally many entries where attention is added up."""


@dataclass(frozen=True)
class Costs:
    """What a layer takes, in seconds."""

    project_s: float
    """Norm, queries, keys and values of one token."""
    feed_s: float
    """Output projection and feed-forward of one token."""
    attend_s: float
    """One query token's attention to one entry; what ``attention`` says comes before it."""
    num_layers: int
    latency_s: float = 0.0
    """Of a message."""
    entry_s: float = 0.0
    """Sending one entry of one layer."""
    row_bytes_s: float = 0.0
    """Sending the residual of one token."""
    attention: tuple[tuple[float, float], ...] = ()
    """Entries that one query token sees, in order, and the seconds that its attention takes, as far as measured."""
    masked: tuple[tuple[float, float], ...] = ()
    """The same where all entries are attended to and some are masked afterwards."""
    step_s: float = 0.0
    """One layer of a step that decodes one token."""
    sum_s: float = 0.0
    """The sum of one row of a chunk over all ranks, sending and adding; 0 takes it from ``row_bytes_s``."""
    sum_step_s: float = 0.0
    """The sum of a row that is alone."""
    entry_work_s: float = 0.0
    """What a rank that computes loses to one entry of one layer that is sent or received meanwhile."""

    def attention_s(self, count: int, before: int) -> float:
        """Return the seconds of ``count`` tokens' attention, the first of which sees ``before`` others."""
        if len(self.attention) < 2:
            return self.attend_s * count * (before + count / 2)
        rows, total = min(count, PORTION), 0.0
        for first in range(0, count, rows):
            portion = min(rows, count - first)
            total += portion * _between(self.attention, before + first + portion / 2)
        return total

    def masked_s(self, count: int, total: int) -> float:
        """Return the seconds of ``count`` tokens' attention to all of ``total`` entries."""
        if len(self.masked) < 2:
            return self.attend_s * count * total
        return count * _between(self.masked, total)

    @staticmethod
    def of(config: ModelConfig, *, rate: float = 1e9) -> Costs:
        """Return costs by the number of multiplications, at ``rate`` of them in a second and with a free link."""
        heads = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        matrices = 3 if config.gated else 2
        return Costs(
            project_s=config.width * (heads + 2 * keys) / rate,
            feed_s=config.width * (heads + matrices * config.ffn_width) / rate,
            attend_s=2 * heads / rate,
            num_layers=config.num_layers,
        )


def _between(points: Sequence[Sequence[float]], at: float) -> float:
    """Return the height over ``at`` of the line through points, which goes on beyond them and never below zero."""
    place = min(max(bisect_left([x for x, _ in points], at), 1), len(points) - 1)
    (low, before), (high, behind) = points[place - 1], points[place]
    return max(0.0, before + (behind - before) * (at - low) / (high - low))


def punctual() -> float:
    """Return the factor of a transfer that takes as long as its bytes say."""
    return 1.0


def first_token_s(
    counts: Sequence[int],
    costs: Costs,
    *,
    attention_s: Callable[[int, int], float] | None = None,
    late: Callable[[], float] = punctual,
) -> float:
    """Return when the last rank of a chain has the entries of the last layer, in the model above.

    Args:
        counts: lengths of the pieces.
        costs: of every rank.
        attention_s: seconds of so many tokens' attention behind so many others; None is ``costs.attention_s``.
        late: gives by which factor the next transfer takes longer than its bytes say.
    """
    attention_s = costs.attention_s if attention_s is None else attention_s
    offsets = [0, *accumulate(counts)]
    passed = [0.0] * costs.num_layers
    for place, count in enumerate(counts):
        begun = arrived = 0.0
        send_s = costs.latency_s + offsets[place] * costs.entry_s
        moved = offsets[place] + (offsets[place + 1] if place < len(counts) - 1 else 0)
        attend_s = attention_s(count, offsets[place]) + costs.feed_s * count + costs.entry_work_s * moved
        for layer in range(costs.num_layers):
            if place:
                arrived = max(passed[layer], arrived) + send_s * late()
            passed[layer] = max(begun + costs.project_s * count, arrived)
            begun = passed[layer] + attend_s
    return passed[-1]


def gathered_s(counts: Sequence[int], costs: Costs, *, is_dense: bool) -> float:
    """Return when all entries are there if every layer begins with a gathering of all ranks' entries.

    begun[l + 1] = max_i(begun_i[l] + project(c_i)) + gather + attend(c_i) + feed(c_i)
    """
    total = sum(counts)
    gather_s = costs.latency_s + (total - min(counts)) * costs.entry_s
    begun = [0.0] * len(counts)
    offsets = [0, *accumulate(counts)]
    meeting = 0.0
    attending = [
        costs.masked_s(count, total) if is_dense else costs.attention_s(count, offsets[place])
        for place, count in enumerate(counts)
    ]
    for _ in range(costs.num_layers):
        meeting = max(at + costs.project_s * count for at, count in zip(begun, counts, strict=True)) + gather_s
        for place, count in enumerate(counts):
            begun[place] = meeting + attending[place] + costs.feed_s * count
    return meeting


def alone_s(length: int, costs: Costs) -> float:
    """Return how long one rank takes."""
    return costs.num_layers * ((costs.project_s + costs.feed_s) * length + costs.attention_s(length, 0))


def even(length: int, num_ranks: int, grid: int) -> list[int]:
    """Return lengths of neighbouring pieces that are as equal as the grid allows; the last one ends the prompt.

    Args:
        length: tokens of the prompt.
        num_ranks: number of pieces.
        grid: pieces begin at multiples of it.
    """
    return on_grid([length * (place + 1) / num_ranks for place in range(num_ranks - 1)], length, grid)


def balanced(length: int, num_ranks: int, grid: int, costs: Costs) -> list[int]:
    """Return the best pieces that coordinate sweeps find, from several starts.

    Args:
        length: tokens of the prompt.
        num_ranks: number of pieces; there are at least as many portions of the grid.
        grid: pieces begin at multiples of it.
        costs: of the machine.
    """
    starts = [even(length, num_ranks, grid), on_grid(_equal_work(length, num_ranks, costs), length, grid)]
    return min((_swept(start, grid, costs) for start in starts), key=lambda counts: first_token_s(counts, costs))


def _swept(counts: list[int], grid: int, costs: Costs) -> list[int]:
    """Move one boundary at a time, in ever smaller steps, while that makes the chain faster."""
    best, best_s = counts, first_token_s(counts, costs)
    stride = max(grid, sum(counts) // (4 * len(counts)) // grid * grid)
    while stride >= grid:
        improved = False
        for place in range(len(counts) - 1):
            for step in (-2 * stride, -stride, stride, 2 * stride):
                moved = list(best)
                moved[place] += step
                moved[place + 1] -= step
                if min(moved) <= 0:
                    continue
                moved_s = first_token_s(moved, costs)
                if moved_s < best_s * (1 - 1e-9):
                    best, best_s, improved = moved, moved_s, True
        if not improved:
            stride //= 2
            stride -= stride % grid
    return best


def _equal_work(length: int, num_ranks: int, costs: Costs) -> list[float]:
    """Return boundaries between pieces of equal work, links left aside."""
    per_token = costs.project_s + costs.feed_s

    def work(tokens: float) -> float:
        return per_token * tokens + costs.attention_s(round(tokens), 0)

    found = []
    for place in range(1, num_ranks):
        low, high = 0.0, float(length)
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if work(middle) < work(length) * place / num_ranks else (low, middle)
        found.append(low)
    return found


def on_grid(bounds: Sequence[float], length: int, grid: int) -> list[int]:
    """Return the lengths of pieces between boundaries that are moved onto the grid, none of them empty."""
    num_portions = -(-length // grid)
    assert num_portions > len(bounds), "every piece has a portion of its own"
    portions: list[int] = []
    for place, bound in enumerate(bounds):
        least = (portions[-1] if portions else 0) + 1
        portions.append(min(max(round(bound / grid), least), num_portions - (len(bounds) - place)))
    places = [0, *(grid * portion for portion in portions), length]
    return [stop - start for start, stop in pairwise(places)]


def entries_sent(counts: Sequence[int]) -> int:
    """Return how many entries of each layer the chain sends: every rank but the last its prefix and its own."""
    return sum(list(accumulate(counts))[:-1])


def busiest_square(counts: Sequence[int]) -> int:
    """Return the most products of one query with one key that a rank of the chain computes, with dense attention."""
    return max(count * stop for count, stop in zip(counts, accumulate(counts), strict=True))

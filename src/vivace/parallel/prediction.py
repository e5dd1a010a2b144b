"""What each way to share a model would take for a prompt and for decoding, from what was measured of ranks and link.

Costs of one rank beside which the others are idle and costs of ranks that all compute at once are two things where they
share memory, so that both are measured: the first ones hold for a rank alone, the second ones for all other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vivace.core.config import ModelConfig
from vivace.parallel.partition import PORTION, Costs, alone_s, first_token_s, gathered_s, punctual
from vivace.parallel.shares import shares_of


@dataclass(frozen=True)
class ShareWork:
    """Which parts of a layer's work one rank has where heads and columns are divided."""

    project: float
    """Of queries, keys and values."""
    attend: float
    output: float
    """Of the attention's output projection, as a part of all that follows attention, the feed-forward included."""
    ffn: float
    """Of the feed-forward, likewise."""


def share_work(config: ModelConfig, num_ranks: int) -> tuple[ShareWork, ...]:
    """Return the parts of all ranks, as ``shares_of`` divides a model among equally fast ones.

    Raises:
        ConfigError: so many ranks cannot share it.
    """
    c, matrices = config, 3 if config.gated else 2
    query_width = c.num_heads * c.head_dim
    feed = query_width + matrices * c.ffn_width
    found = []
    for share in shares_of(config, num_ranks):
        heads, keys, columns = (stop - first for first, stop in (share.heads, share.kv_heads, share.columns))
        found.append(
            ShareWork(
                project=(heads + 2 * keys) / (c.num_heads + 2 * c.num_kv_heads),
                attend=heads / c.num_heads,
                output=heads * c.head_dim / feed,
                ffn=matrices * columns / feed,
            )
        )
    return tuple(found)


def tensor_s(length: int, costs: Costs, works: Sequence[ShareWork], *, late: Callable[[], float] = punctual) -> float:
    """Return how long a prompt takes where all ranks meet after attention and after the feed-forward of every layer.

    Args:
        length: of the prompt.
        costs: of each rank; ``sum_s`` is what a sum of as many ranks as there are takes.
        works: what each rank does of a layer.
        late: gives by which factor the next sum takes longer than its bytes say.
    """
    project, feed = costs.project_s * length, costs.feed_s * length
    attention = costs.attention_s(length, 0)
    attending = max(work.project * project + work.attend * attention + work.output * feed for work in works)
    feeding = max(work.ffn * feed for work in works)
    num_passes = -(-length // PORTION)
    by_bytes = num_passes * costs.latency_s + sent_of_sum(len(works)) * costs.row_bytes_s * length
    one_sum = costs.sum_s * length or by_bytes
    num_layers = costs.num_layers
    return num_layers * (attending + feeding) + one_sum * sum(late() for _ in range(2 * num_layers))


def sent_of_sum(num_ranks: int) -> float:
    """Return how many rows a rank sends to all others together for the sum of one row of a prompt."""
    return 1.0 if num_ranks == 2 else 2 * (num_ranks - 1) / num_ranks


def staged_s(
    length: int, num_ranks: int, costs: Costs, *, gathers: bool, late: Callable[[], float] = punctual
) -> float:
    """Return how long a prompt takes whose chunks follow one another through ranks that have some layers each.

    Args:
        length: of the prompt.
        num_ranks: number of ranks.
        costs: of each of them.
        gathers: whether entries are sent to the last rank, behind the rows of each chunk.
        late: gives by which factor the next transfer takes longer than its bytes say.
    """
    layers = costs.num_layers / num_ranks
    ended, sent = [0.0] * num_ranks, [0.0] * num_ranks
    for first in range(0, length, PORTION):
        count, arrived = min(PORTION, length - first), 0.0
        work = layers * ((costs.project_s + costs.feed_s) * count + costs.attention_s(count, first))
        work += layers * costs.entry_work_s * count if gathers else 0.0
        for stage in range(num_ranks):
            ended[stage] = max(ended[stage], arrived) + work
            if stage == num_ranks - 1:
                continue
            sent[stage] = max(sent[stage], ended[stage]) + costs.row_bytes_s * count * late()
            arrived = sent[stage] + costs.latency_s
            if gathers:
                sent[stage] += costs.entry_s * layers * count * late()
    return max(ended[-1], *sent)


def prompt_times(
    length: int,
    pieces: Sequence[int],
    equal: Sequence[int],
    together: Costs,
    alone: Costs,
    num_ranks: int,
    works: Sequence[ShareWork] = (),
) -> dict[str, float]:
    """Return how long each way of reading a prompt takes, by its name.

    Args:
        length: of the prompt.
        pieces: of the chain.
        equal: pieces where entries are gathered.
        together: costs of a rank beside which all others compute.
        alone: costs of a rank beside which the others are idle.
        num_ranks: number of ranks.
        works: parts of the ranks where heads and columns are divided; none leaves "tensor" out.
    """
    found = {
        "one": alone_s(length, alone),
        "runahead": first_token_s(pieces, together),
        "sequence-causal": gathered_s(equal, together, is_dense=False),
        "pipeline-gathered": staged_s(length, num_ranks, together, gathers=True),
        "pipeline": staged_s(length, num_ranks, together, gathers=False),
    }
    return found | ({"tensor": tensor_s(length, together, works)} if works else {})


def decoding_times(together: Costs, alone: Costs, num_ranks: int, works: Sequence[ShareWork] = ()) -> dict[str, float]:
    """Return how long the layers take for one token of one sequence, by the name of the way; the head is left out.

    Args:
        together: costs of a rank beside which all others compute.
        alone: costs of a rank beside which the others are idle.
        num_ranks: number of ranks.
        works: parts of the ranks where heads and columns are divided; none leaves "tensor" out.
    """
    layers = together.num_layers
    found = {
        "one": layers * alone.step_s,
        "pipeline": layers * alone.step_s + num_ranks * (together.latency_s + together.row_bytes_s),
    }
    if not works:
        return found
    own = together.project_s / (together.project_s + together.feed_s)
    attending = max(own * work.project + (1 - own) * work.output for work in works)
    feeding = max((1 - own) * work.ffn for work in works)
    message = together.sum_step_s or together.latency_s + (num_ranks - 1) * together.row_bytes_s
    return found | {"tensor": layers * (together.step_s * (attending + feeding) + 2 * message)}

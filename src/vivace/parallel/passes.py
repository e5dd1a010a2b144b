"""What rank 0 tells the others: integers that describe a pass or a change of a cache, and the rows of the pass.

number of integers | operation, cache, ... | rows (T, E), where the operation is ``RUN``
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.rows import runs_of
from vivace.core.seams import Memory
from vivace.core.step import Step

OPEN, CLOSE, RUN, COMMIT, TRUNCATE, RELEASE, RESTORE, FORK, READ, ECHO, WIRE, TIME, HEADS = range(13)
"""Operations."""

STAGES, CHOSEN_STAGES = 32, 64
"""Added to the operations of a pipeline where there is another leader, and where it is taken for some prompts only."""

_DENSE = -1
"""Stands for the number of a cache in passes without one."""


def packed(operation: int, numbers: Sequence[int]) -> bytes:
    """Return a message of integers."""
    return np.array([len(numbers) + 1, operation, *numbers], dtype=np.int64).tobytes()


def unpacked(message: bytearray) -> tuple[int, list[int], memoryview]:
    """Return the operation of a message, its integers and what follows them."""
    count = int(np.frombuffer(message, np.int64, 1)[0])
    operation, *numbers = np.frombuffer(message, np.int64, count, offset=8).tolist()
    return operation, numbers, memoryview(message)[8 * (count + 1) :]


def pack_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return lists as one list, each behind its length."""
    return list(chain.from_iterable([len(each), *each] for each in lists))


def unpack_lists(numbers: Sequence[int]) -> list[list[int]]:
    """Return the lists that ``pack_lists`` joined."""
    lists, at = [], 0
    while at < len(numbers):
        stop = at + 1 + numbers[at]
        lists.append(list(numbers[at + 1 : stop]))
        at = stop
    return lists


def pack_pass(step: Step, cache: int | None, start: int, stop: int, offset: int = 0) -> bytes:
    """Return the message of a pass of a call's rows through layers start..stop-1; ``offset`` is the leader's."""
    batch, length = step.grid or (0, 0)
    head = (
        *(_DENSE if cache is None else cache, start, stop, step.num_rows, step.num_write, step.num_feed),
        *(step.row_count, int(step.is_prompt), int(step.chunk is not None), batch, length, int(step.causal)),
        *(0 if step.tail is None else step.tail.shape[1], int(step.extent is not None)),
    )
    fields = [step.slot, step.position, step.entry, step.seen]
    fields += [field.reshape(-1) for field in (step.tail, step.extent) if field is not None]
    numbers = torch.cat([torch.tensor((_NUM_HEAD + sum(map(len, fields)) + 1, offset + RUN, *head)), *fields])
    return numbers.numpy().tobytes()


_NUM_HEAD = 14


def cache_of_pass(numbers: Sequence[int]) -> int | None:
    """Return the number of the cache that a pass works on; None for a dense pass."""
    return None if numbers[0] == _DENSE else numbers[0]


def unpack_pass(numbers: Sequence[int], memory: Memory) -> tuple[Step, int, int]:
    """Return the call of a pass, with its first layer and one past its last.

    Args:
        numbers: the integers of its message.
        memory: this rank's part of the cache.
    """
    (
        _,
        start,
        stop,
        rows,
        num_write,
        num_feed,
        row_count,
        is_prompt,
        is_chunk,
        batch,
        length,
        causal,
        wide,
        has_extent,
    ) = numbers[:_NUM_HEAD]
    sizes = [rows, rows, num_write, rows, rows * wide, rows * has_extent]
    flat = torch.tensor(numbers[_NUM_HEAD:], dtype=torch.int64).split(sizes)
    slot, position, entry, seen = flat[:4]
    if isinstance(memory, KVCache):
        memory.reserve(slot[:num_write].tolist(), entry.tolist())
    step = Step(
        memory,
        slot,
        position,
        entry,
        seen,
        flat[4].view(rows, wide) if wide else None,
        num_write,
        num_feed,
        extent=flat[5] if has_extent else None,
        grid=(batch, length) if batch else None,
        causal=bool(causal),
        chunk=runs_of(slot.tolist()) if is_chunk else None,
        row_count=row_count,
        is_prompt=bool(is_prompt),
    )
    return step, start, stop


def rows_of(rest: memoryview, count: int, dtype: torch.dtype) -> Tensor:
    """Return the rows (T, E) behind a pass's integers."""
    return torch.frombuffer(rest, dtype=dtype).view(count, -1) if count else torch.empty(0, 0, dtype=dtype)

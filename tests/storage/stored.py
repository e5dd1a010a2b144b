"""Tiny checkpoints as stores, and what they answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.decode.runs import Result, finish
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.storage.budget import plan_memory
from vivace.storage.io.readers import Reader
from vivace.storage.loading import Storage, load_stored
from vivace.storage.store import Store

PROMPTS = (tuple(range(3, 40)), (5, 17, 42, 8, 23))
TOKENS = 64


def answers(
    model: Decoder, prompts: tuple[tuple[int, ...], ...] = PROMPTS, drafter: Drafter | None = None
) -> list[Result]:
    """Greedy answers with log-probabilities, one sequence after the other."""
    drafter = NoDrafts() if drafter is None else drafter
    requests = [Request(prompt, 8, drafter, logprobs=True) for prompt in prompts]
    with torch.inference_mode():
        return finish(Session(model, num_slots=1, capacity=TOKENS, chunk=16), requests)


@contextmanager
def opened(
    store: Store, share: float | None = None, reader: str = "buffered", **more: object
) -> Iterator[tuple[Decoder, Storage]]:
    """A store loaded with a share of the memory that all of it takes."""
    budget = None if share is None else int(plan_memory(store, None, TOKENS).num_bytes * share)
    model, storage = load_stored(store.folder, budget, reader=reader, num_tokens=TOKENS, **more)  # type: ignore[arg-type]
    try:
        yield model, storage
    finally:
        storage.close()


def same(a: list[Result], b: list[Result]) -> bool:
    """Tokens and every bit of their log-probabilities."""
    return [(r.tokens, r.logprobs) for r in a] == [(r.tokens, r.logprobs) for r in b]


def distance(a: list[Result], b: list[Result]) -> float:
    """Largest difference of log-probabilities; the tokens are the same."""
    assert [r.tokens for r in a] == [r.tokens for r in b]
    return max(abs(x - y) for r, s in zip(a, b, strict=True) for x, y in zip(r.logprobs, s.logprobs, strict=True))


@contextmanager
def broken(reader: Reader, folder: Path) -> Iterator[None]:
    """Its descriptor is that of a folder for a while, so that every read fails, whoever makes it."""
    assert reader.file is not None
    kept, other = os.dup(reader.file), os.open(folder, os.O_RDONLY)
    os.dup2(other, reader.file)
    try:
        yield
    finally:
        os.dup2(kept, reader.file)
        os.close(kept)
        os.close(other)

"""Parts of a request that fail on purpose: drafters at any of their calls, processors, cached prompts, stop rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Drafter, DraftState, TargetPass, Verdict
from vivace.decode.request import Emitted, Request
from vivace.decode.session import Session
from vivace.errors import VivaceError

CALLS = ("propose", "run", "observe", "commit")


class Panic(BaseException):
    """As libraries written in Rust raise: no ``Exception``."""


@dataclass
class Plan:
    """When a drafter fails."""

    call: str
    """One of ``CALLS``, or ``open``, ``truncate``, ``release``."""
    at: int = 0
    """Which of these calls fails, of those that ``concerns`` is true of; the later ones too when ``stays``."""
    stays: bool = False
    is_late: bool = False
    """It fails after it has done what it does."""
    error: BaseException = field(default_factory=lambda: RuntimeError("planted"))
    concerns: Callable[[Sequence[int]], bool] = lambda slots: True
    """Told the slots of a call."""
    num_calls: int = 0
    num_failed: int = 0

    def around(self, call: str, slots: Sequence[int], do: Callable[[], Any]) -> Any:
        """Do it, or fail."""
        if call != self.call or not self.concerns(slots):
            return do()
        fails = self.num_calls == self.at or (self.stays and self.num_calls > self.at)
        self.num_calls += 1
        if not fails:
            return do()
        self.num_failed += 1
        if self.is_late:
            do()
        raise self.error


class Failing:
    """Fills ``Drafter``: another one, and a plan to fail by."""

    def __init__(self, inner: Drafter, plan: Plan) -> None:
        self.name, self.inner, self.plan = inner.name, inner, plan
        self.text_bytes, self.leaves_all_entries = inner.text_bytes, inner.leaves_all_entries

    def open(self, cache: KVCache) -> DraftState:
        return self.plan.around("open", range(cache.num_slots), lambda: FailingState(self.inner.open(cache), self.plan))  # type: ignore[no-any-return]


class FailingState:
    """Fills ``DraftState`` and ``Traversal``."""

    def __init__(self, inner: DraftState, plan: Plan) -> None:
        self.inner, self.plan, self.traversal = inner, plan, self
        self.saved, self.restore, self.extend, self.fork = inner.saved, inner.restore, inner.extend, inner.fork

    @property
    def reason(self) -> str | None:
        return self.inner.reason

    def propose(self, context: Context) -> Draft:
        return self.plan.around("propose", context.slots, lambda: self.inner.propose(context))  # type: ignore[no-any-return]

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        return self.plan.around("run", draft.slots, lambda: self.inner.traversal.run(model, draft, cache, chunk=chunk))  # type: ignore[no-any-return]

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        self.plan.around("observe", draft.slots, lambda: self.inner.observe(draft, passed, verdict))

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.plan.around("commit", slots, lambda: self.inner.commit(slots, paths))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.plan.around("truncate", slots, lambda: self.inner.truncate(slots, lengths))

    def release(self, slots: Sequence[int]) -> None:
        self.plan.around("release", slots, lambda: self.inner.release(slots))


@dataclass
class Outcome:
    """Everything that was heard of a request."""

    tokens: list[int] = field(default_factory=list)
    guesses: list[tuple[int, ...]] = field(default_factory=list)
    reason: str | None = None
    error: VivaceError | None = None

    def add(self, emitted: Emitted) -> None:
        assert self.reason is None, "nothing may follow the end"
        self.tokens += emitted.tokens
        self.guesses += emitted.guesses or ()
        self.reason, self.error = emitted.finish_reason, emitted.error


def outcomes(session: Session, requests: Sequence[Request], *, every: int = 0) -> list[Outcome]:
    """Run requests to their ends; one joins every ``every`` steps, all at once when 0."""
    found: dict[int, Outcome] = {}
    waiting, step = list(requests), 0
    while waiting or not session.is_idle:
        while waiting and (not every or step % every == 0):
            found[session.admit(waiting.pop(0))] = Outcome()
            if every:
                break
        for emitted in session.step():
            found[emitted.request_id].add(emitted)
        step += 1
        assert step < 2000, "it does not end"
    return [found[number] for number in sorted(found)]


def explode(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor with a bug."""
    raise ZeroDivisionError("a bug of its own")


def bars_from(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that excludes everything behind so many tokens."""

    def bar(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf) if ids.shape[1] >= length else scores

    return bar

"""Driving a session to its end and collecting what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats


@dataclass
class Result:
    """Everything a session said about one request."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: FinishReason | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)

    def add(self, emitted: Emitted) -> None:
        assert self.reason is None, "nothing may follow the end"
        self.tokens += emitted.tokens
        self.logprobs += emitted.logprobs or ()
        self.reason = emitted.finish_reason
        self.stats = emitted.stats


def finish(session: Session, requests: Sequence[Request], *, every: int = 0) -> list[Result]:
    """Run requests to their ends; one joins every ``every`` steps, all at once when 0."""
    waiting = list(requests)
    results: dict[int, Result] = {}
    step = 0
    while waiting or not session.is_idle:
        while waiting and (not every or step % every == 0):
            results[session.admit(waiting.pop(0))] = Result()
            if every:
                break
        for emitted in session.step():
            if emitted.error is not None:
                raise emitted.error
            results[emitted.request_id].add(emitted)
        step += 1
    return [results[request_id] for request_id in sorted(results)]

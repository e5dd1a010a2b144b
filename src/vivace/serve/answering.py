"""Turns a parsed request into a reply: runs its jobs, collects its choices, writes them whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vivace.decode.request import Emitted, FinishReason
from vivace.serve.api_error import APIError
from vivace.serve.bodies import GenerationBody
from vivace.serve.call import Call, Calls
from vivace.serve.choice import Choice, NewTokens, TokenInfo
from vivace.serve.metrics import Metrics
from vivace.serve.parsing import ParsedRequest
from vivace.serve.replies import Extras, Head, ResponseShape
from vivace.serve.usage import metrics, usage
from vivace.serve.worker import PromptProgress, Worker

T = TypeVar("T")
KEEP_ALIVE_S = 15.0
"""Seconds of silence after which a stream sends a comment, so that proxies do not close it."""


@dataclass(frozen=True)
class Echo:
    """The prompt, as the beginning of an answer."""

    text: str
    tokens: Sequence[TokenInfo] = ()


class Reply:
    """One HTTP request while it is answered."""

    def __init__(
        self,
        parsed: ParsedRequest,
        body: GenerationBody,
        shape: ResponseShape,
        head: Head,
        extras: Extras,
        echoes: Sequence[Echo] = (),
        *,
        num_new: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            parsed: what to run.
            body: which extras were asked for.
            shape: how it is written.
            head: what every object begins with.
            extras: parts that were asked for.
            echoes: per prompt, when answers begin with it.
            num_new: 0 runs nothing: the prompt is all that is asked for.
        """
        self.arrived_at = time.perf_counter()
        self.parsed, self.body, self.shape, self.head, self.extras = parsed, body, shape, head, extras
        spells = extras.logprobs or extras.trace
        self.shared = body.n // body.num_texts
        """Choices of each job: several are what one search finds."""
        self.choices = [
            Choice(index, request, parsed.tokenizer, parsed.method, spells, parsed.reader())
            for index, request in enumerate(request for request in parsed.requests for _ in range(self.shared))
        ]
        for choice in self.choices if echoes else ():
            echo = echoes[choice.index // body.n]
            choice.echo_text, choice.echo = echo.text, list(echo.tokens)
        self.runs = num_new != 0
        for choice in () if self.runs else self.choices:
            choice.finish_reason = "length"
        self.queue_s = 0.0

    def call(self, worker: Worker, calls: Calls) -> Call:
        """Return the jobs of this reply, one for each choice, not yet given to the worker."""
        return Call(
            worker,
            calls,
            self.parsed.requests if self.runs else (),
            priority=self.body.priority,
            reports_progress=self.body.return_progress,
            group=self.body.num_texts,
        )

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of the reply so far, in OpenAI's format."""
        return usage(self.parsed.prompts, self.choices)

    @property
    def metrics(self) -> dict[str, Any]:
        """Times and speculative-decoding counters of the reply, to be read when it is complete."""
        return metrics(self.choices, self.arrived_at, self.queue_s)

    def take(self, job: int, emitted: Emitted, metrics: Metrics) -> list[tuple[Choice, NewTokens]]:
        """Add what a step of a job wrote to its choices and to the metrics."""
        choices = self.choices[job * self.shared : (job + 1) * self.shared]
        own = [emitted] if self.shared == 1 else apart(emitted, len(choices), len(choices[0].tokens))
        return [(choice, self._take(choice, one, metrics)) for choice, one in zip(choices, own, strict=True)]

    def _take(self, choice: Choice, emitted: Emitted, metrics: Metrics) -> NewTokens:
        before = choice.last_at
        fresh = choice.take(emitted)
        count = len(fresh.tokens)
        metrics.count("generation_tokens", count)
        if before and count:
            metrics.observe("inter_token_latency_seconds", [(choice.last_at - before) / count] * count)
        elif not before:
            metrics.observe("time_to_first_token_seconds", [choice.last_at - self.arrived_at])
        if choice.finish_reason is not None:
            metrics.finished(choice, self.arrived_at, self.queue_s)
        return fresh

    async def gather(self, call: Call, metrics: Metrics) -> None:
        """Run all jobs to their end and collect what they emit in ``choices``."""
        async for found in call.events():
            if found is not None and isinstance(found[1], Emitted):
                self.queue_s = call.queue_s
                self.take(found[0], found[1], metrics)

    def whole(self) -> dict[str, Any]:
        """Return the complete answers as one object."""
        choices = [self.shape.whole(choice, self.extras) for choice in self.choices]
        if self.extras.token_ids and len(self.parsed.prompts) > 1:
            choices = [whole | {"prompt_token_ids": self._prompt_of(whole["index"])} for whole in choices]
        reply = self.head.object(self.shape.kind, choices)
        if self.extras.token_ids:
            reply["prompt_token_ids"] = list(self.parsed.prompts[0])
        return {**reply, "usage": self.usage, "metrics": self.metrics}

    async def chunks(self, call: Call, metrics: Metrics) -> AsyncIterator[str]:
        """Run all jobs and yield server-sent events as they come."""
        try:
            for choice in self.choices:
                for part in self._beginning(choice):
                    yield self._event([part])
            async for found in call.events(KEEP_ALIVE_S):
                if found is None:
                    yield ": keep-alive\n\n"
                elif isinstance(found[1], PromptProgress):
                    yield self._event([], prompt_progress=_progress(found[1]))
                elif isinstance(found[1], Emitted):
                    self.queue_s = call.queue_s
                    yield self._step(found[0], found[1], metrics)
            if self.body.options.include_usage:
                yield self._event([], usage=self.usage, metrics=self.metrics)
        except APIError as api_error:  # the status is sent already: what is left is to say so in the stream
            yield f"data: {json.dumps(api_error.body)}\n\n"
        yield "data: [DONE]\n\n"

    def _prompt_of(self, index: int) -> list[int]:
        """Return the tokens of the prompt that a choice answers."""
        prompts = self.parsed.prompts
        return list(prompts[index * len(prompts) // len(self.choices)])

    def _beginning(self, choice: Choice) -> list[dict[str, Any]]:
        opening = self.shape.opening(choice.index)
        parts = [] if opening is None else [opening]
        if self.extras.token_ids and (choice.index == 0 or len(self.parsed.prompts) > 1):
            opening = parts[0] if parts else self.shape.piece(choice.index, NewTokens(""), Extras())
            parts = [{**opening, "prompt_token_ids": self._prompt_of(choice.index)}]
        if choice.echo_text:
            parts.append(self.shape.piece(choice.index, NewTokens(choice.echo_text, choice.echo), self.extras))
        if choice.finish_reason and (closing := self.shape.closing(choice.index, choice.finish_reason)):
            parts.append(closing)
        return parts

    def _step(self, job: int, emitted: Emitted, metrics: Metrics) -> str:
        lines = ""
        for choice, fresh in self.take(job, emitted, metrics):
            lines += self._event([self.shape.piece(choice.index, fresh, self.extras)])
            if (reason := choice.reason) is not None:
                closing = self.shape.closing(choice.index, reason)
                lines += "" if closing is None else self._event([closing])
        return lines

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        chunk = self.head.object(self.shape.chunk_kind, choices)
        if self.body.options.include_usage and "usage" not in more:
            chunk["usage"] = self.usage if self.body.options.continuous_usage_stats else None
        elif self.body.options.continuous_usage_stats:
            chunk["usage"] = self.usage
        return f"data: {json.dumps({**chunk, **more}, ensure_ascii=False)}\n\n"


def apart(emitted: Emitted, count: int, known: int) -> list[Emitted]:
    """Return what a step of a search wrote to each of its ``count`` choices, which have ``known`` tokens in common.

    Before the end all choices get what no beam can change any more. In the end each gets the rest of its own text; a
    search that found fewer texts leaves the last choices as they are.
    """
    if emitted.finish_reason is None:
        return [emitted] * count
    texts: list[Emitted] = []
    for found in emitted.hypotheses[:count]:
        reason: FinishReason = "stop" if found.is_stopped else "length"
        texts.append(replace(emitted, tokens=found.tokens[known:], finish_reason=reason, hypotheses=(found,)))
    empty = replace(emitted, tokens=(), finish_reason="length", hypotheses=())
    return texts + [empty] * (count - len(texts))


class EventStream(StreamingResponse):
    """A reply as server-sent events. When the client leaves, or the stream ends, its jobs are closed."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, call: Call, metrics: Metrics) -> None:
        super().__init__(reply.chunks(call, metrics), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and close the jobs afterwards in any case."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def cancel_on_disconnect(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled if the client leaves.

    Raises:
        APIError: the client has left (499).
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "the client closed the connection", code="client_closed")
    finally:
        for one in (task, gone):
            one.cancel()


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def head(parsed: ParsedRequest, shape: ResponseShape, fingerprint: str) -> Head:
    """Return the fields that every object of one reply begins with: a new id, the time, the model."""
    return Head(f"{shape.id_prefix}{uuid.uuid4().hex}", int(time.time()), parsed.model, fingerprint)


def _progress(event: PromptProgress) -> dict[str, Any]:
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": round(1e3 * event.elapsed_s, 3),
    }

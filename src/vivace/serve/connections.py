"""Limits of connections: the time for a request's head, idle time, unread answers, and their number.

uvicorn limits none of these. It waits forever for a head, or for a discarded body, that arrives one byte at a time, and
its ``limit_concurrency`` counts only connections that have sent a whole head. When all places are taken, the connection
that has gone longest without completing a request is closed for the new one, so idle connections (Slowloris, RSnake
2009) cannot keep others out.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from math import ceil
from typing import ClassVar

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vivace.serve.api_error import APIError
from vivace.serve.config import ServeConfig

READ_BYTES = 4 << 10
"""Bytes read from a connection before another has its turn: parsing 256 KiB in chunks of one byte takes .2 s."""
MAX_HEAD_BYTES = 16 << 10
"""Largest head of a request."""

CUTS: Mapping[str, str] = {
    "head_timeout": "no whole head of a request came in time",
    "read_timeout": "the client did not read its answer",
    "displaced": "all places were taken and this one had waited longest for a request",
    "refused": "all places were taken by requests",
    "malformed": "what came was no HTTP",
}
"""Reasons for which the server closes a connection."""


class Connections:
    """Data that all connections of a server share: their limits, which are open, responses and closed
    ones by reason.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.open: set[Connection] = set()
        self.cut: Counter[str] = Counter(dict.fromkeys(CUTS, 0))
        self.responses: Counter[tuple[str, str]] = Counter()
        """Number of responses by route and status."""

    def responded(self, route: str, status: int) -> None:
        """Count a response by route and status."""
        self.responses[route, str(status)] += 1

    def settings(self, app: ASGIApp) -> uvicorn.Config:
        """Return the uvicorn settings for an application with these connections."""
        config = self.config
        return uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=type("BoundConnection", (Connection,), {"shared": self}),
            ws="none",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=ceil(config.idle_timeout_s),
            timeout_graceful_shutdown=max(1, round(config.grace_s)),
            lifespan="on",
        )

    @property
    def is_full(self) -> bool:
        """Return whether more connections are open than allowed."""
        return len(self.open) > self.config.max_connections

    def make_room_for(self, newcomer: Connection) -> None:
        """Add a connection; if there are too many, close the one longest without a complete request."""
        waiting = [one for one in self.open if one.keeps_waiting]
        self.open.add(newcomer)
        if waiting and self.is_full:
            min(waiting, key=lambda one: one.waiting_since).cut("displaced")


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's connection with a limit for every wait; ``Connections.settings`` makes the class that is used."""

    shared: ClassVar[Connections]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take up a connection, and limit the wait for the head of its first request."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._read = memoryview(bytearray(READ_BYTES))
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.waiting_since = self.loop.time()
        self.shared.make_room_for(self)
        self._start("head_timeout", self.shared.config.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that has ended, and stop its timers."""
        self.shared.open.discard(self)
        for reason in list(self._timers):
            self._stop(reason)
        super().connection_lost(exc)

    @property
    def keeps_waiting(self) -> bool:
        """Return whether the client has sent no complete request, so that no answer is lost with this connection."""
        is_between = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        return is_between and not self.transport.is_closing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that asyncio fills; its size is what is read at once."""
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the first ``nbytes`` bytes of the buffer."""
        self.data_received(bytes(self._read[:nbytes]))

    def handle_events(self) -> None:
        """Handle the parsed events; a whole head ends the wait for one.

        A client is refused only here: one that is refused before it has sent its request may never read the answer.
        """
        before = self.cycle
        self.app = self._refuse if self.shared.is_full else self.config.loaded_app
        super().handle_events()
        if self.cycle is not before:
            self._stop("head_timeout")
            self.waiting_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Wait for the next head: for its first byte as long as a connection may idle, then as long as for any head.

        The rest of a body that is discarded has to arrive in that time too.
        """
        config = self.shared.config
        self.waiting_since = self.loop.time()
        if self.transport.is_closing():
            self._start("read_timeout", config.read_timeout_s)
        else:
            self._start("head_timeout", config.idle_timeout_s + config.head_timeout_s)
        super().on_response_complete()  # may find the next head at once

    def pause_writing(self) -> None:
        """Limit the time in which the client has to continue reading."""
        super().pause_writing()
        self._start("read_timeout", self.shared.config.read_timeout_s)

    def resume_writing(self) -> None:
        """Stop the limit on unread answers: the client has read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop("read_timeout")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; what was written before has to be read in time."""
        super().timeout_keep_alive_handler()
        self._start("read_timeout", self.shared.config.read_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is no HTTP, if no answer has begun, and close the connection."""
        is_silent = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        message = f"the request is no HTTP/1.1, or its head is longer than {MAX_HEAD_BYTES} bytes"
        self.cut("malformed", APIError(400, message) if is_silent else None)

    def cut(self, reason: str, api_error: APIError | None = None) -> None:
        """End the connection, with a last word where the client can take it for an answer.

        Args:
            reason: one of ``CUTS``.
            api_error: the last word; without one the connection is gone at once.
        """
        if self.transport.is_closing() and reason != "read_timeout":
            return
        self.shared.cut[reason] += 1
        if api_error is None:
            self.transport.abort()
            return
        self.shared.responded("other", api_error.status)
        self.transport.write(_response(api_error))
        self.transport.close()
        self._start("read_timeout", self.shared.config.read_timeout_s)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer every request of a connection for which there is no place with 503 (an ASGI application)."""
        self.shared.cut["refused"] += 1
        message = f"all {self.shared.config.max_connections} connections are taken; try again later"
        api_error = APIError(503, message, code="too_many_connections")
        self.shared.responded("other", api_error.status)
        headers = {**api_error.headers, "Connection": "close"}
        await JSONResponse(api_error.body, api_error.status, headers=headers)(scope, receive, send)

    def _start(self, reason: str, timeout_s: float) -> None:
        """Start a timer that closes the connection for this reason unless it is stopped."""
        self._stop(reason)
        late = {"head_timeout": self._head_is_late}.get(reason, lambda: self.cut(reason))
        self._timers[reason] = self.loop.call_later(timeout_s, late)

    def _stop(self, reason: str) -> None:
        if timer := self._timers.pop(reason, None):
            timer.cancel()

    def _head_is_late(self) -> None:
        """Answer a client that has sent part of a head, and close the connection."""
        has_begun = self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
        seconds = self.shared.config.head_timeout_s
        api_error = APIError(408, f"the head of the request did not come within {seconds:g} seconds", code="timeout")
        self.cut("head_timeout", api_error if has_begun else None)


def _response(api_error: APIError) -> bytes:
    """Return an error as a whole HTTP response, after which the connection closes."""
    body = json.dumps(api_error.body).encode()
    lines = [
        f"HTTP/1.1 {api_error.status} {HTTPStatus(api_error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name.lower()}: {value}" for name, value in api_error.headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

"""Checks that precede every route: key, host, size and kind of the body; adds request ids and security headers."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable
from hashlib import blake2b

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vivace.serve.api_error import APIError
from vivace.serve.config import ServeConfig
from vivace.serve.hosts import is_allowed

log = logging.getLogger(__name__)
HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Answered under any host name, because those who start servers use their addresses."""

OPEN_PATHS = HEALTH_PATHS | {"/"}
"""Answered without a key: the page contains no secrets, and health checks have no key."""

KNOWN_PATHS = OPEN_PATHS | {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/moderations",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
    "/metrics",
}
"""Counted under their own names when a request is refused before its route is known."""

_ID = re.compile(r"[\w.:-]{1,128}")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Middleware:
    """ASGI middleware. Nothing of a body is parsed before the request has passed the checks."""

    def __init__(self, app: ASGIApp, config: ServeConfig, responded: Callable[[str, int], None]) -> None:
        """Stand before an application.

        Args:
            app: what is guarded.
            config: whom to let in.
            responded: told route and status of every response, those of refused requests too.
        """
        self.app = app
        self.config = config
        self._responded = responded
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        has_begun = False

        async def send_marked(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._responded(_route(scope), message["status"])
                marked = MutableHeaders(scope=message)
                marked["X-Request-Id"] = request_id
                for name, value in _HEADERS.items():
                    marked[name] = value
            await send(message)

        try:
            state["owner"] = self._check(scope, headers)
            body = await self._read(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
        except APIError as api_error:
            await _refuse(api_error, send_marked)
            return
        try:
            await self.app(scope, _replayed(body, receive), send_marked)
        except Exception as error:
            log.error("%s %s failed", request_id, scope["path"], exc_info=error)
            if has_begun:  # nothing can be said any more, and an answer that is cut off must not look whole
                raise ConnectionAbortedError("the answer could not be completed; the log says why") from None
            await _refuse(APIError(500, "the server could not do this; its log says why"), send_marked)

    def _check(self, scope: Scope, headers: Headers) -> bytes:
        """Return the owner of a request, so that owners share nothing: a digest of its key, empty without keys."""
        owner = b""
        hosts = self.config.hosts
        if hosts is not None and scope["path"] not in HEALTH_PATHS and not is_allowed(headers.get("host", ""), hosts):
            # a page of another site that resolves its name to this machine would otherwise read answers
            names = ", ".join(("localhost", *self.config.allowed_hosts))
            raise APIError(403, f"this server answers to {names} only; --allowed-hosts names further hosts")
        if self._keys and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1")  # the bytes that were sent
            if kind.lower() != "bearer" or not _is_one_of(given, self._keys):
                raise APIError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            owner = blake2b(given, digest_size=16).digest()
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise APIError(415, "the body must be JSON; send Content-Type: application/json")
        return owner

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body, if it is not too large and arrives in time."""
        limit = self.config.max_body_bytes
        said = headers.get("content-length", "")
        if said.isdecimal() and int(said) > limit:
            raise _too_large(limit)
        timeout_s = self.config.body_timeout_s
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(499, "the client closed the connection", code="client_closed")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise APIError(408, f"the body did not come within {timeout_s:g} seconds", code="timeout") from None


def _route(scope: Scope) -> str:
    """Return the pattern of a request's route, so that the number of metrics does not depend on the paths requested."""
    found = getattr(scope.get("route"), "path", None)
    return found or (scope["path"] if scope["path"] in KNOWN_PATHS else "other")


def _too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than the {limit} bytes this server takes", code="body_too_large")


def _is_one_of(key: bytes, keys: Iterable[bytes]) -> bool:
    """Return whether a key is among these, in a time that does not depend on which characters agree."""
    found = False
    for known in keys:
        found |= hmac.compare_digest(key, known)
    return found


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that yields the body that was read, and then whatever follows."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(api_error: APIError, send: Send) -> None:
    body = json.dumps(api_error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in api_error.headers.items()]
    await send({"type": "http.response.start", "status": api_error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

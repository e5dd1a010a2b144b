"""Clients of a server under attack, and the well-behaved kinds among them, whose answers are checked.

A kind of client is a function from the client to the outcome of one request, as a word that is counted: a status, or
how the connection ended. What must never happen raises ``Wrong``. Requests are only sent to this machine.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.hostile_answers import CHAT, Known

TIMEOUT_S = 120.0
"""Seconds to wait for an answer."""
PAUSE_S = 0.1
"""Mean seconds between two requests of a client."""
GIVES_WAY = 10
"""Nice level of clients, which take processor time from the server only because they run on the same machine."""
STREAMED = 0.5
"""Share of answers that are requested as streams."""
MAX_FAULTS = 50
"""Number of faults that are described; all are counted."""


class Wrong(Exception):
    """A reply that must never happen."""


@dataclass
class Tally:
    """Counts over all clients."""

    sent: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind."""
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    statuses: Counter[int] = field(default_factory=Counter)
    num_equal: int = 0
    """Number of answers that were compared with known ones and are equal."""
    num_wrong: int = 0
    num_5xx: int = 0
    """Number of statuses of 500 and above, and of server errors inside streams."""
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: str) -> None:
        """Describe something that must never happen."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{kind}: {what[:2000]}")


@dataclass(frozen=True)
class Target:
    """The server under attack, and its known answers."""

    url: str
    keys: Sequence[str]
    ways: Sequence[tuple[str, str]]
    """Models and methods whose greedy answers are those of plain decoding."""
    known: Mapping[str, Sequence[Known]]
    tally: Tally = field(default_factory=Tally)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        assert urlsplit(self.url).hostname == "127.0.0.1", "only this machine is attacked"

    @property
    def place(self) -> tuple[str, int]:
        """Address and port."""
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port


class Client(threading.Thread):
    """A thread that sends requests of one kind until a time or a number of requests is reached."""

    def __init__(
        self, number: int, kind: str, ask: Callable[[Client], str], target: Target, *, until: float, most: int
    ) -> None:
        """Prepare a client.

        Args:
            number: number of the client, which seeds its random choices.
            kind: name under which its outcomes are counted.
            ask: makes one request and returns its outcome.
            target: the server.
            until: when to stop, on the monotonic clock.
            most: largest number of requests.
        """
        super().__init__(name=f"{kind}-{number}", daemon=True)
        self.kind, self.ask, self.target, self.until, self.most = kind, ask, target, until, most
        self.random = random.Random(number)
        self.key = target.keys[number % len(target.keys)]
        self._kept: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Send requests until it is time to stop."""
        os.setpriority(os.PRIO_PROCESS, 0, GIVES_WAY)  # of this thread
        tally = self.target.tally
        for _ in range(self.most):
            if time.monotonic() >= self.until:
                break
            with self.target.lock:
                tally.sent[self.kind] += 1
            outcome = self._outcome()
            with self.target.lock:
                tally.outcomes[self.kind][outcome] += 1
            time.sleep(self.random.uniform(0, 2 * PAUSE_S))
        self.close()

    def _outcome(self) -> str:
        try:
            return self.ask(self)
        except Wrong as error:
            outcome, what = "wrong", str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome, what = f"no answer ({type(error).__name__})", repr(error)
        self.close()
        if outcome == "wrong" or self.kind in KINDS:
            with self.target.lock:
                self.target.tally.num_wrong += 1
                self.target.tally.fault(self.kind, what)
        return outcome

    def close(self) -> None:
        """Close the connection that is kept open."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def post(self, route: str, body: Mapping[str, Any] | bytes, **headers: str) -> http.client.HTTPResponse:
        """Send a request over the connection that is kept open, and return the beginning of the reply."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self._kept is None:
            self._kept = http.client.HTTPConnection(*self.target.place, timeout=TIMEOUT_S)
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}", **headers}
        self._kept.request("POST", route, content, sent)
        reply = self._kept.getresponse()
        self.saw(reply.status)
        return reply

    def saw(self, status: int) -> None:
        """Count a status."""
        with self.target.lock:
            self.target.tally.statuses[status] += 1
            self.target.tally.num_5xx += status >= 500

    def whole(self, reply: http.client.HTTPResponse) -> Any:
        """Return a JSON reply; an error must have the right form and must not be a server error."""
        raw = reply.read()
        found = json.loads(raw)
        if reply.status >= 400:
            self.checked(found.get("error"), str(reply.status))
        return found

    def checked(self, error: Any, where: str) -> str:
        """Return the code of an error; it must have the right form and must not be a server error."""
        if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
            raise Wrong(f"{where}: an error of another shape: {error}")
        if error["type"] == "server_error":
            if where == "stream":
                with self.target.lock:
                    self.target.tally.num_5xx += 1
            raise Wrong(f"{where}: {error}")
        return str(error["code"] or error["type"])

    def events(self, reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream up to its end."""
        while line := reply.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                reply.read()
                return
        raise Wrong("a stream ended without its end")

    def streamed(self, reply: http.client.HTTPResponse) -> tuple[dict[str, Any], str | None]:
        """Return the first choice assembled from a stream, and the code of the error that ended it."""
        text, ids, code = "", [], None
        for event in self.events(reply):
            if "error" in event:
                code = self.checked(event["error"], "stream")
            for part in event.get("choices", ()):
                if part["index"] == 0:
                    text += part.get("text") or part.get("delta", {}).get("content") or ""
                    ids += part.get("token_ids", [])
        return {"text": text, "token_ids": ids}, code

    def answer(self, route: str, body: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """Return (outcome, first choice) of a valid request; the status must be 200, or 429 without a choice."""
        reply = self.post(route, body)
        if reply.status == 200 and body.get("stream"):
            choice, code = self.streamed(reply)
            return ("200", choice) if code is None else (f"200, then {code}", None)
        found = self.whole(reply)
        if reply.status == 429:
            return "429", None
        if reply.status != 200:
            raise Wrong(f"{reply.status} {found} to {body}")
        choice = found["choices"][0]
        choice["text"] = choice.get("text") or choice.get("message", {}).get("content") or ""
        return "200", choice

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """Open a plain connection."""
        with socket.create_connection(self.target.place, timeout=TIMEOUT_S) as found:
            yield found

    def head(self, route: str, length: int | str, key: str | None = None) -> bytes:
        """Return the head of a request."""
        host, port = self.target.place
        lines = (f"POST {route} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {key or self.key}",
                 "Content-Type: application/json", f"Content-Length: {length}")  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def ended(self, connection: socket.socket, wait_s: float = TIMEOUT_S) -> str:
        """Return how a plain connection answers or ends."""
        connection.settimeout(wait_s)
        first = connection.recv(1 << 16)
        if not first:
            return "cut"
        if not first.startswith(b"HTTP/1.1 "):
            raise Wrong(f"no HTTP: {first[:200]!r}")
        status = int(first[9:12])
        self.saw(status)
        if status >= 500:
            raise Wrong(f"{first[:1000]!r}")
        return str(status)


def compared(client: Client, known: Known, body: Mapping[str, Any]) -> str:
    """Send a request and compare the answer with the known one."""
    outcome, choice = client.answer(known.route, body)
    if choice is None:
        return outcome
    if known.choice.get("token_logprobs") and not body.get("stream"):
        choice = {**choice, "token_logprobs": choice["logprobs"]["token_logprobs"]}
    if (difference := known.differs(choice)) is not None:
        raise Wrong(difference)
    with client.target.lock:
        client.target.tally.num_equal += 1
    return "200"


def greedy(client: Client) -> str:
    """Request a greedy answer, which must be the engine's, whatever drafts it."""
    known = client.random.choice(client.target.known["greedy"])
    body = {**known.body, "stream": client.random.random() < STREAMED, "return_trace": client.random.random() < 0.1}
    if client.random.random() < 0.2:  # the others leave it to the server; each way takes a pass of its own
        body["model"], body["method"] = client.random.choice(client.target.ways)
    return compared(client, known, body)


def sampled(client: Client) -> str:
    """Request an answer that is sampled with a seed."""
    known = client.random.choice(client.target.known["sampled"])
    return compared(client, known, {**known.body, "stream": client.random.random() < STREAMED})


def echo(client: Client) -> str:
    """Request the log-probabilities of a prompt."""
    known = client.random.choice(client.target.known["echo"])
    return compared(client, known, known.body)


CHECKED: Sequence[tuple[Mapping[str, Any], Callable[[Any], bool]]] = (
    ({"enum": ["red", "green", "blue"]}, lambda value: value in ("red", "green", "blue")),
    ({"type": "integer", "minimum": 0, "maximum": 999}, lambda value: value in range(1000)),
    (
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "open": {"type": "boolean"}},
            "required": ["name", "open"],
            "additionalProperties": False,
        },
        lambda value: set(value) == {"name", "open"} and len(value["name"]) <= 12 and value["open"] in (True, False),
    ),
)
"""Schemas, each with a function that tells whether a value fits."""


def schema(client: Client) -> str:
    """Request an answer that is constrained to a schema, greedy or sampled, as a stream or not."""
    of, fits = client.random.choice(CHECKED)
    body = {
        "messages": [{"role": "user", "content": "Answer in JSON."}], "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}},
        "temperature": client.random.choice((0, 0.7, 1.5)), "stream": client.random.random() < STREAMED,
    }  # fmt: skip
    outcome, choice = client.answer(CHAT, body)
    if choice is None:
        return outcome
    try:
        value = json.loads(choice["text"])
    except ValueError:  # cut off at its length, which only an object can be
        if not choice["text"].lstrip().startswith("{") and choice["text"].strip():
            raise Wrong(f"{choice['text']!r} does not fit {of}") from None
        return "200, cut off"
    if not fits(value):
        raise Wrong(f"{value} does not fit {of}")
    return "200"


KINDS: Mapping[str, Callable[[Client], str]] = {"greedy": greedy, "sampled": sampled, "schema": schema, "echo": echo}
"""Kinds of clients whose requests must be answered."""

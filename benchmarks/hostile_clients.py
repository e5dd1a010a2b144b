"""Clients of a server that is under attack, and those of them who behave: what they are owed can be checked.

A kind of client is a function from the client to the outcome of one request, in a word that is counted: a status, or
how the connection ended. What must never happen raises ``Wrong``. Nothing is sent to anywhere but this machine.
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
"""For an answer."""
PAUSE_S = 0.1
"""Between two requests of a client, on average."""
GIVES_WAY = 10
"""Nice level of clients: on machines of their own they would take nothing from the server."""
STREAMED = 0.5
"""Share of answers asked for as streams."""
MAX_FAULTS = 50
"""Described; all are counted."""


class Wrong(Exception):
    """A reply that must not be."""


@dataclass
class Tally:
    """What all clients saw."""

    sent: Counter[str] = field(default_factory=Counter)
    """By kind."""
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    statuses: Counter[int] = field(default_factory=Counter)
    num_equal: int = 0
    """Answers that were compared with known ones, and are those."""
    num_wrong: int = 0
    num_5xx: int = 0
    """Statuses, and errors in streams."""
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: str) -> None:
        """Describe something that must not be."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{kind}: {what[:2000]}")


@dataclass(frozen=True)
class Target:
    """The server, and what is known of it."""

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
    """Asks in its way until it is time to stop, or it has asked often enough."""

    def __init__(
        self, number: int, kind: str, ask: Callable[[Client], str], target: Target, *, until: float, most: int
    ) -> None:
        """Ask nothing yet.

        Args:
            number: of the client; seeds what it draws.
            kind: what its outcomes are counted under.
            ask: makes one request and returns its outcome.
            target: whom to ask.
            until: when to stop, on the monotonic clock.
            most: requests.
        """
        super().__init__(name=f"{kind}-{number}", daemon=True)
        self.kind, self.ask, self.target, self.until, self.most = kind, ask, target, until, most
        self.random = random.Random(number)
        self.key = target.keys[number % len(target.keys)]
        self._kept: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Ask."""
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
        """End the connection that is kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def post(self, route: str, body: Mapping[str, Any] | bytes, **headers: str) -> http.client.HTTPResponse:
        """The beginning of a reply, over the connection that is kept."""
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
        """A JSON reply; errors have their shape, and none is the server's."""
        raw = reply.read()
        found = json.loads(raw)
        if reply.status >= 400:
            self.checked(found.get("error"), str(reply.status))
        return found

    def checked(self, error: Any, where: str) -> str:
        """The code of an error, which is not the server's."""
        if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
            raise Wrong(f"{where}: an error of another shape: {error}")
        if error["type"] == "server_error":
            if where == "stream":
                with self.target.lock:
                    self.target.tally.num_5xx += 1
            raise Wrong(f"{where}: {error}")
        return str(error["code"] or error["type"])

    def events(self, reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The events of a stream, to its end."""
        while line := reply.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                reply.read()
                return
        raise Wrong("a stream ended without its end")

    def streamed(self, reply: http.client.HTTPResponse) -> tuple[dict[str, Any], str | None]:
        """The first choice that a stream's parts make, and the code of the error it ended with."""
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
        """(outcome, first choice) of a request that ought to be answered: 200, or 429 and no choice."""
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
        """A bare connection."""
        with socket.create_connection(self.target.place, timeout=TIMEOUT_S) as found:
            yield found

    def head(self, route: str, length: int | str, key: str | None = None) -> bytes:
        """The head of a request."""
        host, port = self.target.place
        lines = (f"POST {route} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {key or self.key}",
                 "Content-Type: application/json", f"Content-Length: {length}")  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def ended(self, connection: socket.socket, wait_s: float = TIMEOUT_S) -> str:
        """How a bare connection answers or ends."""
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


def _compared(client: Client, known: Known, body: Mapping[str, Any]) -> str:
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
    """A bystander; the answer is what the engine writes, whatever drafts it."""
    known = client.random.choice(client.target.known["greedy"])
    body = {**known.body, "stream": client.random.random() < STREAMED, "return_trace": client.random.random() < 0.1}
    if client.random.random() < 0.2:  # the others leave it to the server; each way takes a pass of its own
        body["model"], body["method"] = client.random.choice(client.target.ways)
    return _compared(client, known, body)


def sampled(client: Client) -> str:
    """One whose answer is drawn with a seed."""
    known = client.random.choice(client.target.known["sampled"])
    return _compared(client, known, {**known.body, "stream": client.random.random() < STREAMED})


def echo(client: Client) -> str:
    """One that has its prompt scored."""
    known = client.random.choice(client.target.known["echo"])
    return _compared(client, known, known.body)


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
"""Schemas, and whether a value fits."""


def schema(client: Client) -> str:
    """One whose answer is bound to a schema, drawn or not, streamed or not."""
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
"""Kinds that are owed an answer."""

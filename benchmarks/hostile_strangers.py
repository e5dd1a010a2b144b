"""Malicious clients: absurd values, slow connections, hang-ups, wrong keys, costly requests, and no HTTP at all."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.hostile_answers import CHAT, COMPLETIONS
from benchmarks.hostile_clients import Client, Wrong
from benchmarks.hostile_requests import ABSURD, BOMBS, ROUTES, split_values


def absurd(client: Client) -> str:
    """Send extreme values of fields, and in one of five bodies a value that no field accepts."""
    draw = client.random
    route = draw.choice(sorted(ROUTES))
    good, bad = split_values(route)
    names = draw.sample(sorted(good), draw.randrange(9))
    body = {**ROUTES[route][2], **{name: draw.choice(good[name]) for name in names}}
    if draw.random() < 0.2:
        name = draw.choice(sorted(bad))
        body[name] = draw.choice((*bad[name], *ABSURD))
    reply = client.post(route, body)
    if reply.getheader("Content-Type", "").startswith("text/event-stream"):
        code = client.streamed(reply)[1]
        return "200" if code is None else f"200, then {code}"
    client.whole(reply)
    return str(reply.status)


def bombs(client: Client) -> str:
    """Send a request made to take long."""
    path, body, _ = BOMBS[client.random.choice(sorted(BOMBS))]
    reply = client.post(path, body)
    client.whole(reply)
    return str(reply.status)


def slow(client: Client) -> str:
    """Send a head or body in small pieces, or hardly read the answer."""
    body = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()
    whole = client.head(COMPLETIONS, len(body)) + body
    way = client.random.choice(("head", "body", "late", "reader"))
    with client.raw() as connection:
        if way == "reader":
            return f"reader: {_reads_slowly(client, connection)}"
        if way == "head":
            pieces = [whole[:20], *[b"X-A: b\r\n"] * 400]
        elif way == "body":
            pieces = [client.head(COMPLETIONS, 4000), *[b" "] * 400]
        else:
            pieces = [whole[at : at + 16] for at in range(0, len(whole), 16)]
        connection.settimeout(0.1)
        for piece in pieces:
            connection.sendall(piece)
            try:
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    return f"{way}: cut"
                break
            except TimeoutError:
                continue
        return f"{way}: {client.ended(connection)}"


def _reads_slowly(client: Client, connection: socket.socket) -> str:
    """Read a long stream slowly for some seconds."""
    body = json.dumps({"prompt": "abc", "n": 4, "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5})
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(client.head(COMPLETIONS, len(body)) + body.encode())
    outcome = client.ended(connection)
    until = time.monotonic() + client.random.uniform(1, 6)
    while time.monotonic() < until and connection.recv(256):
        time.sleep(0.2)
    return outcome


def hanging_up(client: Client) -> str:
    """Close the connection during a stream, a body, or before the answer, sometimes with a reset."""
    body = json.dumps({"prompt": "abc", "n": client.random.choice((1, 1, 4)), "max_tokens": 400, "ignore_eos": True,
                       "stream": client.random.random() < 0.7}).encode()  # fmt: skip
    way = client.random.choice(("stream", "stream", "waiting", "body", "echo", "silent"))
    if way == "echo":
        known = client.random.choice(client.target.known["echo"])
        body = json.dumps(dict(known.body)).encode()
    with client.raw() as connection:
        if client.random.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way == "silent":
            return way
        cut = len(body) // 2 if way == "body" else len(body)
        connection.sendall(client.head(COMPLETIONS, len(body)) + body[:cut])
        if way == "stream":
            connection.settimeout(client.random.uniform(0.2, 2.0))
            try:
                client.ended(connection, client.random.uniform(0.2, 2.0))
                for _ in range(client.random.randrange(20)):
                    connection.recv(512)
            except TimeoutError:
                return "stream, before it began"
        else:
            time.sleep(client.random.uniform(0, 0.3))
    return way


def wrong_keys(client: Client) -> str:
    """Send no key, another one, one with the right beginning, or one of an unknown kind."""
    key = client.random.choice(("", "wrong", f"{client.key}x", client.key[:-1], "\xe9\xe8", "x" * 8000, "\x7f"))
    kind = client.random.choice(("Bearer", "Basic", ""))
    body = {"prompt": "abc", "max_tokens": 4}
    reply = client.post(client.random.choice((COMPLETIONS, CHAT, "/tokenize")), body, Authorization=f"{kind} {key}")
    client.whole(reply)
    if reply.status != 401:
        raise Wrong(f"{reply.status} with the key {kind} {key[:20]!r}")
    return "401"


def huge(client: Client) -> str:
    """Send a body beyond the limit: announced, sent, or in chunks without an end."""
    way = client.random.choice(("said", "sent", "chunks"))
    with client.raw() as connection:
        if way == "said":
            connection.sendall(client.head(COMPLETIONS, 10**12))
            return f"said: {client.ended(connection)}"
        try:
            if way == "sent":
                connection.sendall(client.head(COMPLETIONS, 1 << 22))
                connection.sendall(b" " * (1 << 22))
            else:
                head = client.head(COMPLETIONS, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
                connection.sendall(head + b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
                for _ in range(64):
                    connection.sendall(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return f"{way}: cut"
        return f"{way}: {client.ended(connection)}"


NO_JSON: Sequence[bytes] = (
    b"", b"{", b"\xff\xfe", b"null", b"[]", b'"text"', b"a=b&c=d", b"[" * 5000, b'{"messages": 1}',
    b'{"prompt": "\xc3"}', b'{"messages": [], "nonsense": 1}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}',
    b'{"prompt": 1e999}',
)  # fmt: skip
NO_HTTP: Sequence[bytes] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 100,
    b"A" * 40_000, b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
)  # fmt: skip


def no_json(client: Client) -> str:
    """Send a body that is not JSON or has other fields, or something that is not HTTP."""
    if client.random.random() < 0.4:
        with client.raw() as connection:
            connection.sendall(client.random.choice(NO_HTTP))
            return f"no HTTP: {client.ended(connection)}"
    kind = client.random.choice(("application/json", "application/json", "text/plain", ""))
    reply = client.post(
        client.random.choice((COMPLETIONS, CHAT, "/tokenize", "/detokenize")),
        client.random.choice(NO_JSON),
        **{"Content-Type": kind},
    )
    client.whole(reply)
    if reply.status not in (400, 415):
        raise Wrong(f"{reply.status} to no JSON")
    return str(reply.status)


KINDS: Mapping[str, Callable[[Client], str]] = {
    "absurd": absurd,
    "bombs": bombs,
    "slow": slow,
    "hanging up": hanging_up,
    "wrong keys": wrong_keys,
    "huge": huge,
    "no JSON": no_json,
}

"""Checks the header ``Host`` of requests, and the origins of pages that may send them."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from vivace.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine can reach."""

ANY = "*"
"""Stands for every name, or every origin."""


def host_name(host: str) -> str | None:
    """Return the name in a ``Host`` header, without its port and in lower case; None if it is not well-formed."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def is_allowed(host: str, allowed: Iterable[str]) -> bool:
    """Return whether a ``Host`` header has one of these names; ``*.example.com`` stands for every name
    below that one.
    """
    name = host_name(host)
    return name is not None and any(
        pattern == ANY or name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in allowed
    )


def checked_host(name: str) -> str:
    """Return a name of ``--allowed-hosts`` in the form in which it is compared.

    Raises:
        ConfigError: it is no host name, for example because it has a scheme, a port or a path.
    """
    rest = name.removeprefix("*.")
    if name != ANY and (host_name(f"[{rest}]" if ":" in rest else rest) != rest.lower() or "*" in rest):
        raise ConfigError(
            f"--allowed-hosts {name!r}: expected a host name such as api.example.com or *.example.com, without scheme "
            "and port, or *"
        )
    return name.lower()


def checked_origin(origin: str) -> str:
    """Return an origin of ``--cors`` in the form in which browsers send it.

    Raises:
        ConfigError: it is no origin.
    """
    try:
        parts = urlsplit(origin)
        is_origin = origin == f"{parts.scheme}://{parts.netloc}" and parts.hostname is not None and "@" not in origin
    except ValueError:
        is_origin = False
    if origin != ANY and not (is_origin and parts.scheme in ("http", "https")):
        raise ConfigError(f"--cors {origin!r}: expected an origin such as https://app.example.com, or *")
    return origin.lower()

"""Names under which a server may be asked, and pages of which sites may ask it."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from vivace.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""

ANY = "*"
"""Every name, or every origin."""


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header, without its port and in lower case; None where it cannot be read."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def is_allowed(host: str, allowed: Iterable[str]) -> bool:
    """Whether a ``Host`` header is one of these names; ``*.example.com`` stands for every name below that one."""
    name = host_name(host)
    return name is not None and any(
        pattern == ANY or name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in allowed
    )


def checked_host(name: str) -> str:
    """A name of ``--allowed-hosts`` as it is compared.

    Raises:
        ConfigError: it is no host name, such as one with a scheme, a port or a path.
    """
    rest = name.removeprefix("*.")
    if name != ANY and (host_name(f"[{rest}]" if ":" in rest else rest) != rest.lower() or "*" in rest):
        raise ConfigError(
            f"--allowed-hosts {name!r}: expected a host name such as api.example.com or *.example.com, without scheme "
            "and port, or *"
        )
    return name.lower()


def checked_origin(origin: str) -> str:
    """An origin of ``--cors`` as browsers send it.

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

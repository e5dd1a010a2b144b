"""The settings of a server, which its operator chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from vivace.errors import ConfigError
from vivace.serve.hosts import LOOPBACK, checked_host, checked_origin
from vivace.serve.keys import check_keys

LONGEST_DEFAULT = 8192
"""Largest context of a sequence where neither the operator nor the model sets a smaller one."""


@dataclass(frozen=True)
class ServeConfig:
    """The settings of one server; times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """Address on which the server listens."""
    port: int = 8000
    """Port on which the server listens."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which each request must carry one; empty asks for no key."""
    allow_no_key: bool = False
    """Whether the server may be reached from other machines without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the header `Host` of a request may have, besides those of this machine. Empty allows all, or only
    those of this machine while the server listens on the loopback address."""
    cors: tuple[str, ...] = ()
    """Sites whose pages may send requests from a browser."""
    served_model_name: str = "vivace"
    """Name of the base model in requests and responses; ``vivace serve`` gives the name of its folder."""
    method: str = "auto"
    """Method of requests that name none."""
    prefill: str = "full"
    """How prompts are read of requests that do not say; lossy with anything but full."""
    keep: str | None = None
    """How many of their tokens go on; None is what `prefill` has."""
    min_prompt: int | None = None
    """Shortest prompt of which tokens are left out; None is 512."""
    adapter_bytes: int | None = None
    """Largest memory for LoRAs; those that no request runs leave when others are asked for. None keeps all."""
    adapter_folder: Path | None = None
    """Folder whose LoRAs callers may load and unload by name; None lets them do neither."""
    decode_keep: str | float | None = None
    """Share of the tokens that each new one reads, while those left out may come back, or "same"; None is none."""
    num_slots: int = 16
    """Number of sequences decoded at once."""
    max_queue: int = 64
    """Number of sequences that may wait; further ones are refused with 429."""
    max_model_len: int | None = None
    """Largest number of tokens of a prompt and its answer together; None is the model's context, but no more than
    ``LONGEST_DEFAULT``."""
    default_max_tokens: int | None = None
    """Longest answer of requests that set no limit; None is the checkpoint's limit, or else the rest of the context."""
    max_body_bytes: int = 1 << 20
    """Largest body of a request."""
    max_connections: int = 512
    """Number of open connections; one more closes the one that has gone longest without completing a request."""
    head_timeout_s: float = 10.0
    """Longest time in which the head of a request must arrive."""
    body_timeout_s: float = 30.0
    """Longest time in which its body must arrive after the head."""
    idle_timeout_s: float = 60.0
    """Longest time that a connection may stay open between two requests."""
    read_timeout_s: float = 60.0
    """Longest time that a client may read nothing of an answer that is ready for it."""
    prefill_budget: int = 256
    """Number of prompt tokens read between two decoding steps; a small one delays running answers less. Fewer than 256
    are as much work: a chunk in some of the layers."""
    prefix_cache_bytes: int = 256 << 20
    """Largest memory for keys and values of earlier texts, given back when running ones need it; 0 keeps none."""
    grace_s: float = 10.0
    """Longest time that answers may still run after the server was told to stop."""
    stall_timeout_s: float = 120.0
    """Longest time of one step before `/health/live` asks for a restart."""
    metrics_compat: bool = False
    """Whether metrics are exported under vLLM's names too."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_slots", 1),
            ("max_queue", 0),
            ("max_body_bytes", 1),
            ("max_connections", 1),
            ("prefill_budget", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, found {getattr(self, name)}")
        for name in ("head_timeout_s", "body_timeout_s", "idle_timeout_s", "read_timeout_s", "stall_timeout_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} must be a time above 0, found {getattr(self, name)}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ConfigError(f"default_max_tokens must be at least 1, found {self.default_max_tokens}")
        if self.adapter_bytes is not None and self.adapter_bytes < 1:
            raise ConfigError(f"adapter_bytes must be at least 1, found {self.adapter_bytes}")
        if self.adapter_folder is not None:
            if not self.adapter_folder.is_dir():
                raise ConfigError(f"adapter_folder: there is no directory {self.adapter_folder}")
            if not self.api_keys:
                raise ConfigError("adapter_folder lets callers load adapters; give --api-key-file FILE beside it")
        check_keys(self.api_keys)
        object.__setattr__(self, "allowed_hosts", tuple(map(checked_host, self.allowed_hosts)))
        object.__setattr__(self, "cors", tuple(map(checked_origin, self.cors)))
        reached_by = None if self.is_local else f"host {self.host}"
        for name in self.allowed_hosts:
            reached_by = reached_by or (None if name in LOOPBACK else f"allowed host {name}")
        if reached_by and not self.api_keys and not self.allow_no_key:
            raise ConfigError(
                f"{reached_by} can be reached from other machines and no API key is asked for; "
                "give --api-key-file FILE, or --allow-no-key if that is meant"
            )

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the server."""
        return self.host in LOOPBACK

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Return the names that the header `Host` may have; None is any name."""
        return (*LOOPBACK, *self.allowed_hosts) if self.is_local or self.allowed_hosts else None

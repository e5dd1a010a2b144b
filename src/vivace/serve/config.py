"""What the operator of a server decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from vivace.errors import ConfigError
from vivace.serve.hosts import LOOPBACK, checked_host, checked_origin
from vivace.serve.keys import check_keys

LONGEST_DEFAULT = 8192
"""Context of a sequence where neither the operator nor the model says less: entries are allocated at the start."""


@dataclass(frozen=True)
class ServeConfig:
    """The settings of one server; times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of these opens the server; none asks for no key."""
    allow_no_key: bool = False
    """Be reached from beyond this machine without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which the server is asked (`Host`), beside those of this machine; none: all, or only those of this
    machine while it listens on the loopback address."""
    cors: tuple[str, ...] = ()
    """Sites whose pages may ask the server from a browser."""
    served_model_name: str = "vivace"
    method: str = "auto"
    """How requests are decoded that do not say."""
    num_slots: int = 16
    """Sequences decoded at once."""
    max_queue: int = 64
    """Sequences that may wait; further ones are told 429."""
    max_model_len: int | None = None
    """Prompt and answer together, in tokens."""
    default_max_tokens: int | None = None
    """Longest answer of requests that do not say; None is what the checkpoint says, else to the end of the context."""
    max_body_bytes: int = 1 << 20
    max_connections: int = 512
    """Open at once; beyond, the one that has kept the server waiting longest for a request makes room."""
    head_timeout_s: float = 10.0
    """Within this time the head of a request must have come."""
    body_timeout_s: float = 30.0
    """And then its body."""
    idle_timeout_s: float = 60.0
    """How long a connection may stay open between two requests."""
    read_timeout_s: float = 60.0
    """How long a client may read nothing of an answer that is ready for it."""
    prefill_budget: int = 256
    """Prompt tokens read between two decoding steps, so that a long prompt does not hold up running answers."""
    prefix_cache_bytes: int = 256 << 20
    """Memory for entries of prompts seen before; 0 keeps none."""
    grace_s: float = 10.0
    """How long answers may still run after the server was told to stop."""
    stall_timeout_s: float = 120.0
    """How long one step may take before `/health/live` calls for a new start."""
    metrics_compat: bool = False
    """Also export the metrics under vLLM's names."""

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
        """Only this machine reaches the server."""
        return self.host in LOOPBACK

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names under which the server may be asked; None is any name."""
        return (*LOOPBACK, *self.allowed_hosts) if self.is_local or self.allowed_hosts else None

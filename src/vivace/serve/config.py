"""What the operator of a server decides."""

from __future__ import annotations

from dataclasses import dataclass

from vivace.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""

LONGEST_DEFAULT = 8192
"""Context of a sequence where neither the operator nor the model says less: entries are allocated at the start."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of one server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Any of these opens the server; none asks for no key."""
    allow_no_key: bool = False
    """Listen beyond this machine without a key."""
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
    prefill_budget: int = 256
    """Prompt tokens read between two decoding steps, so that a long prompt does not hold up running answers."""
    prefix_cache_bytes: int = 256 << 20
    """Memory for entries of prompts seen before; 0 keeps none."""
    grace_s: float = 10.0
    """How long answers may still run after the server was told to stop."""
    metrics_compat: bool = False
    """Also export the metrics under vLLM's names."""

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 1), ("max_queue", 0), ("max_body_bytes", 1), ("prefill_budget", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ConfigError(f"default_max_tokens must be at least 1, found {self.default_max_tokens}")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key must not be empty")
        if not self.is_local and not self.api_keys and not self.allow_no_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines and no API key is asked for; "
                "give --api-key KEY, or --allow-no-key if that is meant"
            )

    @property
    def is_local(self) -> bool:
        """Only this machine reaches the server."""
        return self.host in LOOPBACK

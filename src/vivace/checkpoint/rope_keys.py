"""Translating the rotary settings of a ``config.json`` into a ``RopeConfig``.

transformers 5 writes ``rope_parameters`` (one dict, or one per layer type); older versions write
``rope_theta``, ``rope_scaling`` (null, or a dict with ``type`` or ``rope_type``) and
``partial_rotary_factor``. Both are read; a kind or a setting that is not computed here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from vivace.checkpoint.config_keys import Keys
from vivace.core.config import RopeConfig, RopeKind
from vivace.errors import ConfigError, UnsupportedError

_SETTINGS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        }
    ),
    "longrope": frozenset(
        {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    ),
}
"""Settings that each kind reads, besides theta and the partial factor."""

_OTHER_NAMES = {("phi3", "su"): "longrope", ("phi3", "yarn"): "longrope"}
"""Names of a kind in one family's older files (transformers, models/phi3/configuration_phi3.py)."""

_SHARED = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
"""Settings that every kind reads."""
_IGNORED = {
    "linear": frozenset({"original_max_position_embeddings"}),
    "dynamic": frozenset({"original_max_position_embeddings"}),
    "default": frozenset({"factor", "original_max_position_embeddings"}),
}
"""Settings that transformers ignores for these kinds: it computes them from ``max_position_embeddings``."""


def read_rope(keys: Keys, head_dim: int, default_theta: float) -> RopeConfig:
    """Return the rotary embedding of a model whose layers share one.

    Raises:
        UnsupportedError: a kind or setting is not computed here.
    """
    new, old = keys.written("rope_parameters"), keys.written("rope_scaling")
    theta, partial = keys.written("rope_theta"), keys.written("partial_rotary_factor")
    given = {"rope_theta": theta or default_theta, "partial_rotary_factor": partial, **(old or new or {})}
    return make_rope(keys, given, head_dim)


def make_rope(keys: Keys, given: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Check and translate one dict of rotary settings.

    Args:
        keys: the file, for the lengths that some kinds need.
        given: ``rope_theta``, ``rope_type`` and what the kind needs.
        head_dim: D.

    Raises:
        UnsupportedError: a kind or setting is not computed here.
        ConfigError: a setting that the kind needs is missing.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = _OTHER_NAMES.get((keys.family, kind), kind)
    if kind not in _SETTINGS:
        raise UnsupportedError(
            f"config.json says rope_type = {kind!r}, which is not supported; supported: {', '.join(_SETTINGS)}"
        )
    rest = {k for k, v in given.items() if v is not None} - _SETTINGS[kind] - _SHARED - _IGNORED.get(kind, frozenset())
    if rest:
        listed = ", ".join(sorted(rest))
        raise UnsupportedError(f"config.json sets {listed} for rope_type {kind!r}, which does not read it")
    width = int(head_dim * (given.get("partial_rotary_factor") or 1.0))
    factor = given.get("factor")
    if kind not in ("default", "longrope") and factor is None:
        raise ConfigError(f"config.json has rope_type {kind!r} without its factor")
    settings: dict[str, Any] = {}
    longest = int(keys.take("max_position_embeddings"))
    if kind == "dynamic":
        settings["original_positions"] = longest
    elif kind in ("llama3", "yarn", "longrope"):
        original = keys.take("original_max_position_embeddings", None) or given.get("original_max_position_embeddings")
        settings["original_positions"] = int(original or longest)
    if kind == "llama3":
        settings |= {name: float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        settings |= {
            "beta_fast": float(given.get("beta_fast") or 32),
            "beta_slow": float(given.get("beta_slow") or 1),
            "truncate": bool(given.get("truncate", True)),
            "attention_factor": _yarn_attention(given),
        }
    if kind == "longrope":
        settings |= _longrope(given, width, longest, settings["original_positions"])
        factor = None
    return RopeConfig(
        theta=float(given["rope_theta"]),
        kind=cast(RopeKind, kind),
        width=None if width == head_dim else width,
        factor=1.0 if kind == "default" else float(factor or 1.0),
        **settings,
    )


def _longrope(given: Mapping[str, Any], width: int, longest: int, original: int) -> dict[str, Any]:
    """Return the divisors and the factor on cosine and sine: as written, else ``sqrt(1 + ln(s) / ln(n0))``, where s is
    how much longer texts may be than n0 (Ding et al. 2024).

    Raises:
        ConfigError: divisors are missing, or are not one for each pair of components.
    """
    divisors = {}
    for field, name in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        values = given.get(name)
        if not isinstance(values, list) or len(values) != width // 2:
            found = len(values) if isinstance(values, list) else values
            raise ConfigError(f"config.json has rope_type 'longrope' and needs {width // 2} of {name}, found {found}")
        divisors[field] = tuple(float(value) for value in values)
    attention = given.get("attention_factor")
    if attention is None:
        stretch = float(given.get("factor") or longest / original)
        attention = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return {**divisors, "attention_factor": float(attention)}


def _yarn_attention(given: Mapping[str, Any]) -> float:
    """Return the factor on cosine and sine: as written, else ``0.1 m ln(factor) + 1`` (Peng et al. 2023, eq. 22)."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    factor, above, below = float(given["factor"]), given.get("mscale"), given.get("mscale_all_dim")

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return scale(above) / scale(below) if above and below else scale(1.0)

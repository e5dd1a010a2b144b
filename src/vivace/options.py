"""Settings of generation, as ``Engine.generate`` and its relatives take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vivace.decode.session import Progress
from vivace.errors import ConfigError, nearest


@dataclass(frozen=True)
class Options:
    """Settings of generation, under Hugging Face's names; None uses the checkpoint's ``generation_config.json``."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_strings: str | Sequence[str] | None = None
    ignore_eos: bool = False
    seed: int = 0
    method: str = "auto"
    raw: bool = False
    """Whether to use the prompt as it is, without the chat template."""
    logprobs: bool = False
    """Whether to return log p of every token under the model, before any logits processor. Then all logits of every
    token are computed, where greedy decoding needs the largest only.
    """
    batch_size: int = 16
    """Number of sequences decoded at once; further prompts wait."""
    exact: bool = False
    """Whether to pad every decoding pass to the same number of rows. This is slower, and only needed on machines where
    the bits of a row's result depend on the number of rows computed with it (``docs/losslessness.md``).
    """
    num_draft_tokens: int | None = None
    """Number of draft tokens per step, for a method that drafts; None uses the method's or its adapter's."""
    quality: float | None = None
    """Agreement target of a method with early exits: the share of early-exit tokens that should equal the whole
    model's. It must be one of the targets that the adapter was calibrated for. None is .98.
    """
    prefill: str = "full"
    """How prompts are read: "full", or with tokens left out, which is lossy ("lazy", "static", "random", "lexical")."""
    keep: str | None = None
    """How many tokens go on where some are left out: "paper", "balanced" or "fast", or layers and shares such as
    "9:0.5,18:0.5". None uses those of ``prefill``.
    """
    min_prompt: int | None = None
    """Length of the shortest prompt of which tokens are left out; None is 512."""
    progress: Progress | None = None
    """Called with the number of prompt tokens read and their total while prompts are read."""

    def __post_init__(self) -> None:
        for name, value, least in (("batch_size", self.batch_size, 1), ("min_new_tokens", self.min_new_tokens, 0)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Options:
        """Build options from keyword arguments.

        Raises:
            ConfigError: a name is unknown; the message names the nearest.
        """
        known = {f.name for f in dataclasses.fields(Options)}
        for name in values:
            if name not in known:
                raise ConfigError(f"generate has no argument {name!r}{nearest(name, known)}")
        return Options(**values)

"""Settings of generation, as ``Engine.generate`` and its relatives take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vivace.core.sampling import DRAWS, Sampling
from vivace.decode.beams import BeamPlan, EarlyStopping
from vivace.decode.session import Progress
from vivace.errors import ConfigError, UnsupportedError, nearest, shown
from vivace.prefill.table import Reading

DEFAULT_NEW_TOKENS = 256
"""Length limit of an answer if neither the caller nor the checkpoint sets one; less if the context ends earlier."""
_SEARCHES_ONLY = ("length_penalty", "early_stopping", "num_return_sequences")
"""Options that have no effect without beams."""
_ONE = ("num_return_sequences", 1)
"""What is returned in any case."""


def _number(value: Any) -> float:
    """Return a number; an integer stays one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    """Return a whole number, which may be written as 4.0."""
    if _number(value) % 1 != 0:
        raise TypeError
    return int(value)


def _flag(value: Any) -> bool:
    """Return a truth value, also for 0, 1 and None."""
    if not isinstance(value, int | None) or value not in (None, 0, 1):
        raise TypeError
    return bool(value)


def _text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """Return texts."""
    return tuple(map(_text, value))


def _names(value: Any) -> tuple[str | None, ...]:
    """Return names, in whose place there may be None."""
    return tuple(None if name is None else _text(name) for name in value)


def _function(value: Any) -> Progress:
    """Return a function."""
    if not callable(value):
        raise TypeError
    return value  # type: ignore[no-any-return]


KINDS: Sequence[tuple[str, Sequence[Callable[[Any], Any]], Sequence[str]]] = (
    (
        "an integer",
        (_integer,),
        (
            *("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "num_beams"),
            *("num_return_sequences", "seed", "batch_size", "num_draft_tokens", "min_prompt"),
        ),
    ),
    (
        "a number",
        (_number,),
        ("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty", "quality"),
    ),
    ("True or False", (_flag,), ("do_sample", "ignore_eos", "raw", "logprobs", "exact")),
    ("a text", (_text,), ("method", "soft_prompt", "prefill", "keep")),
    ("a number or a text", (_number, _text), ("decode_keep",)),
    ("an integer or a text", (_integer, _text), ("forced_bos_token_id",)),
    ("True, False or 'never'", (_flag, _text), ("early_stopping",)),
    ("a text or a list of texts", (_text, _texts), ("stop_strings",)),
    ("a name or a list of names", (_text, _names), ("adapter",)),
    ("a function", (_function,), ("progress",)),
)
"""What fields may be: how messages call it, what returns a value that is one, and which fields they are."""


@dataclass(frozen=True)
class Options:
    """Settings of generation, under Hugging Face's names; None uses the checkpoint's ``generation_config.json``.

    Numbers and truth values may be those of numpy and PyTorch.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    """Number of texts that are written at the same time, so that the likeliest whole text is found: beam search. 1
    takes or draws one token after the other.
    """
    length_penalty: float | None = None
    """With beams, the score of a text is the sum of log p of its tokens over the number of tokens to this power; larger
    values prefer longer texts. None is the checkpoint's, or 1.
    """
    early_stopping: EarlyStopping | None = None
    """With beams, when a search ends that has found ``num_beams`` texts: True at once, False when no beam seems to
    become better, "never" when none can. None is the checkpoint's, or False.
    """
    num_return_sequences: int | None = None
    """Number of texts that a search returns: the best, and others as ``Result.alternatives``."""
    forced_bos_token_id: int | str | None = None
    """First new token of an encoder-decoder model, as an id or as the tokenizer spells it: the target language of
    multilingual translation.
    """
    stop_strings: str | Sequence[str] | None = None
    ignore_eos: bool = False
    seed: int = 0
    """Of the random numbers of every prompt: the same seed gives the same text, with method ``auto`` where guesses are
    not drawn (docs/losslessness.md). It is not None; for another text every time, draw it.
    """
    method: str = "auto"
    adapter: str | Sequence[str | None] | None = None
    """Name of the LoRA that the model wears for this call, or one for each prompt, with None for the model as it is."""
    soft_prompt: str = "auto"
    """With a pool of soft prompts: the name of the one in front of the text, "none", or "auto", which takes the one
    that the prompt reads most in the first layer.
    """
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
    decode_keep: str | float | None = None
    """Share of the tokens that each new token reads behind every layer where tokens are left out, or "same" for the
    shares of ``keep``. They are chosen anew for each token, and what was left out of the prompt may come back; only
    method "plain" decodes so. None, like 1, stays with the tokens that the prompt kept.
    """
    progress: Progress | None = None
    """Called with the number of prompt tokens read and their total while prompts are read."""

    def __post_init__(self) -> None:
        for what, kinds, names in KINDS:
            for name in names:
                if self.asked([name]) or getattr(Options, name) is not None:
                    object.__setattr__(self, name, _of_kind(getattr(self, name), kinds, f"{name} must be {what}"))
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be at least -2**63 and below 2**64, found {self.seed}")
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("min_new_tokens", self.min_new_tokens, 0),
            ("num_beams", self.num_beams, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")

    def asked(self, names: Sequence[str]) -> list[str]:
        """Return those of these options that are set."""
        return [name for name in names if getattr(self, name) is not None]

    def sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """Return the sampling settings of these options, or else of the checkpoint.

        Giving a temperature or another setting that only affects sampling turns sampling on.

        Raises:
            ConfigError: such a setting was given together with ``do_sample=False``.
        """
        values = {}
        for field in dataclasses.fields(Sampling):
            given = getattr(self, field.name)
            values[field.name] = defaults.get(field.name, field.default) if given is None else given
        if self.asks_to_sample:
            values["do_sample"] = True
        elif self.beams(defaults) is not None:
            values["do_sample"] = False
        return Sampling(**values)

    @property
    def asks_to_sample(self) -> bool:
        """Return whether a setting is given that only sampling has, which turns it on.

        Raises:
            ConfigError: such a setting was given together with ``do_sample=False``.
        """
        asked = self.asked(DRAWS)
        if not asked or self.temperature == 0:
            return bool(self.do_sample)
        if self.do_sample is False:
            raise ConfigError(f"{asked[0]} has no effect on greedy decoding; leave it out, or drop do_sample=False")
        return True

    def limit(self, defaults: Mapping[str, Any], room: int, num_prompt_tokens: int) -> int:
        """Return the largest number of new tokens: the one asked for, or else the checkpoint's or the default, if they
        fit.

        Args:
            defaults: settings of the checkpoint.
            room: positions that the text may have.
            num_prompt_tokens: tokens that it has already.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        room = max(1, room - num_prompt_tokens)
        if "max_new_tokens" in defaults:
            return min(room, int(defaults["max_new_tokens"]))
        if "max_length" in defaults:
            return min(room, max(1, int(defaults["max_length"]) - num_prompt_tokens))
        return min(room, DEFAULT_NEW_TOKENS)

    def least(self, defaults: Mapping[str, Any], limit: int, num_prompt_tokens: int) -> int:
        """Return the least number of new tokens: the one asked for, or else the checkpoint's.

        Raises:
            ConfigError: more than ``limit`` are asked for.
        """
        if self.min_new_tokens is None:
            length = int(defaults.get("min_length", 0)) - num_prompt_tokens
            return min(limit, max(0, length, int(defaults.get("min_new_tokens", 0))))
        if self.min_new_tokens > limit:
            raise ConfigError(f"min_new_tokens is {self.min_new_tokens}, more than the {limit} tokens at most")
        return self.min_new_tokens

    def start(self, defaults: Mapping[str, Any]) -> int:
        """Return the token with which the text of an encoder-decoder model begins.

        Raises:
            UnsupportedError: something is asked for that such a model does not do.
            ConfigError: the checkpoint does not name the token.
        """
        if self.method not in ("auto", "plain"):
            raise UnsupportedError(f"method {self.method} drafts for decoders without an encoder; leave it out")
        if self.prefill != "full":
            raise UnsupportedError(f"an encoder reads its whole source; leave out prefill {self.prefill}")
        if self.adapter is not None:
            raise UnsupportedError("LoRAs are for decoders without an encoder; leave out adapter")
        start = defaults.get("decoder_start_token_id")
        if not isinstance(start, int):
            raise ConfigError(
                "generation_config.json names no decoder_start_token_id, with which texts of this model begin; add it"
            )
        return start

    def beams(self, defaults: Mapping[str, Any]) -> BeamPlan | None:
        """Return how the likeliest text is searched for, None where one token is taken after the other.

        Args:
            defaults: settings of the checkpoint, for options that are not set.

        Raises:
            ConfigError: an option has no effect, or is out of range.
            UnsupportedError: beams are asked for together with what they cannot be combined with.
        """
        count = int(defaults.get("num_beams", 1) if self.num_beams is None else self.num_beams)
        if count == 1:
            asked = [name for name in self.asked(_SEARCHES_ONLY) if (name, getattr(self, name)) != _ONE]
            if asked:
                raise ConfigError(f"{asked[0]} has no effect without beams; give num_beams, or leave {asked[0]} out")
            return None
        if self.asks_to_sample or (self.num_beams is None and defaults.get("do_sample")):
            raise UnsupportedError(
                "beam search takes the likeliest texts and draws none, and sampling is asked for as well; leave out "
                "one of them (num_beams=1, or do_sample=False)"
            )
        if self.method not in ("auto", "plain"):
            raise UnsupportedError(
                f"method {self.method} drafts for one text, and num_beams is {count}; leave out one of them"
            )
        if self.decode_keep is not None and self.decode_keep not in (1, "1"):
            raise UnsupportedError("decode_keep prunes for one text, and there are beams; leave out one of them")
        if self.logprobs:
            raise UnsupportedError("logprobs of single tokens are not kept with beams; leave them out, or num_beams")
        chosen = {name: defaults[name] for name in _SEARCHES_ONLY if name in defaults}
        return BeamPlan(count, **chosen | {name: getattr(self, name) for name in self.asked(_SEARCHES_ONLY)})

    @property
    def one_adapter(self) -> str:
        """Return the name of the adapter of a single prompt.

        Raises:
            ConfigError: there are several, or it is no name.
        """
        if not isinstance(self.adapter, str):
            raise ConfigError(f"adapter must be one name here, found {self.adapter!r}")
        return self.adapter

    def apart(self, count: int) -> list[Options]:
        """Return the options of each of ``count`` prompts, which differ in their adapters.

        Raises:
            ConfigError: there are adapters for another number of prompts.
        """
        if self.adapter is None or isinstance(self.adapter, str):
            return [self] * count
        if len(self.adapter) != count:
            raise ConfigError(f"adapter has {len(self.adapter)} names for {count} prompts; give one for each, or one")
        return [dataclasses.replace(self, adapter=name) for name in self.adapter]

    @property
    def reading(self) -> Reading:
        """Return how prompts are read."""
        return Reading(self.prefill, self.keep, self.min_prompt, self.decode_keep)

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


def _of_kind(value: Any, kinds: Sequence[Callable[[Any], Any]], rule: str) -> Any:
    """Return a value as the first of some kinds that it has.

    Raises:
        ConfigError: it has none of them; the message is the rule and what was found.
    """
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # a number of numpy or PyTorch
    for kind in kinds:
        with suppress(TypeError):
            return kind(plain)
    raise ConfigError(f"{rule}, found {shown(value)}")

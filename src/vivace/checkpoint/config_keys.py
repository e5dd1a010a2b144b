"""Reading a ``config.json`` so that no key is overlooked.

Every key is either read by the family's translator, known not to change the mathematics of inference whatever its
value (``HARMLESS``) or at its value (``neutral_keys.py``), or refused by name. A new key of a new transformers version
is therefore an error here instead of a wrong answer later, unless the caller says by name that it is to be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vivace.checkpoint.neutral_keys import is_neutral
from vivace.checkpoint.quantized.settings import dense_config, settings_of
from vivace.errors import ConfigError, UnsupportedError, nearest

HARMLESS = frozenset(
    {
        # the program that wrote the file, and settings for running it elsewhere
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "model_type", "name_or_path"),
        "transformers_version",
        *("transformers.js_config", "unsloth_version", "unsloth_fixed", "torchscript", "use_cache", "use_bfloat16"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("_from_model_config", "chunk_size_feed_forward", "fast_attention", "gradient_checkpointing"),
        *("pretraining_tp", "reorder_and_upcast_attn", "hybrid_kvcache", "use_return_dict", "dtype", "torch_dtype"),
        # training only
        *("attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout", "layerdrop", "resid_pdrop"),
        *("activation_dropout", "init_std", "initializer_range", "router_aux_loss_coef", "router_jitter_noise"),
        *("classifier_dropout", "summary_first_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
        # special tokens, which the tokenizer and generation_config.json define
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "unk_token_id"),
        # generation settings written here by old versions; those in generation_config.json apply
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length"),
        *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
        *("output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
        *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
        # other heads and other tasks
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "summary_activation"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params"),
        *(
            "cross_attention_hidden_size",
            "is_decoder",
            "tf_legacy_loss",
            "tie_encoder_decoder",
            "n_ctx",
            "prefix_token_id",
        ),
    }
)
"""Keys that do not change the numbers of a text-generating forward pass, whatever their value."""

_REQUIRED = object()


class Keys:
    """A ``config.json`` together with a record of which of its keys have been read.

    Args:
        raw: the parsed file.
        defaults: what a missing key means in this family (transformers' own defaults).
        example: a published checkpoint of this family that is read, for messages.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], example: str = "") -> None:
        self.raw = raw
        self.family = str(raw.get("model_type"))
        self._nearest = f"; {self.family} models such as {example} are read" if example else ""
        self._defaults = defaults
        self._read: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key; if it is missing or null, the family's default, or else ``default``.

        Raises:
            ConfigError: the key is missing and there is no default.
        """
        self._read.add(name)
        value = self.raw.get(name)
        if value is not None:
            return value
        if name in self._defaults:
            return self._defaults[name]
        if default is _REQUIRED:
            raise ConfigError(f"config.json of a {self.family} model has no {name!r}; the checkpoint is incomplete")
        return default

    def written(self, name: str) -> Any:
        """Return the value of a key as it is in the file, None if it is missing or null; no default applies."""
        self._read.add(name)
        return self.raw.get(name)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse every value of a key except ``allowed``; a missing key is accepted.

        Raises:
            UnsupportedError: the key has another value.
        """
        value = self.take(name, None)
        if value is not None and value not in allowed:
            raise self.refusal(name, value, f"only {' or '.join(repr(a) for a in allowed)} is supported")

    def refusal(self, name: str, value: Any, reason: str) -> UnsupportedError:
        """Return the error to raise for a key whose value is not supported."""
        return UnsupportedError(
            f"config.json says {name} = {value!r}, which changes the mathematics; {reason}{self._nearest}"
        )

    def same(self, name: str, other: str) -> None:
        """Read a second name of a setting; it may be missing.

        Raises:
            ConfigError: it has another value than the first name, or than the family's default.
        """
        used, again = self.take(name, None), self.written(other)
        if None not in (used, again) and used != again:
            raise ConfigError(
                f"config.json says {other} = {again!r}, another name of {name}, which is {used!r}; make them equal"
            )

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Refuse every key that has not been read.

        Args:
            ignored: unknown keys that the caller takes to change nothing.

        Raises:
            UnsupportedError: a key is neither read nor known to be harmless.
            ConfigError: a key that is to be ignored is read, or is not there.
        """
        self._check_ignored(ignored)
        unread = {k: v for k, v in self.raw.items() if k not in self._read and k not in HARMLESS}
        rest = {k: v for k, v in unread.items() if k not in ignored and not is_neutral(self.family, k, v)}
        if settings_of(rest) is not None:
            rest = dense_config(rest)
        if rest:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(rest.items()))
            flags = " ".join(f"--ignore-config-key {key}" for key in sorted(rest))
            raise UnsupportedError(
                f"config.json of a {self.family} model has keys unknown to vivace, which may change the "
                f"mathematics: {listed}{self._nearest}; {flags} reads the model as if they were not there"
            )

    def _check_ignored(self, ignored: Sequence[str]) -> None:
        """Refuse to ignore what is read, and what is not there."""
        for key in ignored:
            if key in self._read:
                raise ConfigError(
                    f"config.json: {key} is a setting that {self.family} models use, and cannot be ignored; change it "
                    "in the file"
                )
            if key not in self.raw:
                raise ConfigError(f"config.json has no key {key!r} to ignore{nearest(key, self.raw)}")

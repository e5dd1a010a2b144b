"""Fields that clients of other servers send: which are refused, and which of their values change nothing.

Clients often send every field with its default value. A value that asks for what this server does anyway is accepted as
if it were left out; every other value of such a field is refused by name, so that nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFUSED: Mapping[str, str] = {
    "best_of": "request n choices and choose one",
    "suffix": "text is written only after a prompt",
    "draft_model": "models and adapters are named when the server starts; choose one with `model`",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "this server writes text",
    "modalities": "this server writes text",
    "moderation": "start the server with --guard; /v1/moderations says what it finds",
    "prediction": "drafts come from the server's own methods; see `method`",
    "reasoning_effort": "pass what the chat template understands in `chat_template_kwargs`",
    "early_stopping": "beam search is served by /v1/completions",
    "length_penalty": "beam search is served by /v1/completions",
    "use_beam_search": "beam search is served by /v1/completions",
    "prompt_logprobs": "use `echo` with `logprobs` in /v1/completions",
    "guided_json": "use `response_format`",
    "guided_regex": "use `response_format` with a JSON schema that has a pattern",
    "guided_choice": "use `response_format` with a JSON schema that has an enum",
    "guided_grammar": "use `response_format` with a JSON schema",
    "structured_outputs": "use `response_format`",
    "service_tier": "there is one tier; `priority` orders waiting requests",
    "prompt_cache_key": "cached prompts are found by their content; `cache_salt` keeps them apart",
    "prompt_cache_options": "prompts are kept while there is room, for no stated time; `cache_salt` keeps them apart",
    "prompt_cache_retention": "prompts are kept in memory, while there is room",
    "web_search_options": "this server sends no requests to other machines",
    "verbosity": "say it in the prompt, or pass what the chat template understands in `chat_template_kwargs`",
    "chat_template": "the checkpoint's template is used; requests cannot contain programs",
    "add_generation_prompt": "use `continue_final_message`",
    "include_stop_str_in_output": "the text ends before its stop text; `return_token_ids` has all tokens",
    "truncate_prompt_tokens": "shorten the prompt; nothing is cut silently",
    "typical_p": "use `top_p` or `min_p`",
    "logits_processors": "requests cannot contain programs",
    "store": "nothing is stored",
    "metadata": "nothing is stored",
}
"""Fields of other servers, and what to use instead."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "prediction": ({"type": "content", "content": ""},),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (str,),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "verbosity": ("medium",),
    "include_stop_str_in_output": (False,),
    "typical_p": (1, 1.0),
    "logits_processors": ([],),
    "store": (False,),
    "metadata": ({},),
    "response_format": ({"type": "text"},),
    "stop": ("",),
    "seed": (-1,),
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
}
"""By field: values that change nothing. A type stands for all its values."""


def without_neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that change nothing; fields that depend on others are decided here too."""
    left = {name: value for name, value in values.items() if not _is_neutral(value, NEUTRAL.get(name, ()))}
    if "length_penalty" in values and "use_beam_search" in left:
        left["length_penalty"] = values["length_penalty"]  # a checkpoint may have another one
    if "best_of" in left and _is_same(left["best_of"], left.get("n", 1)):
        del left["best_of"]  # all that were written are returned
    if _is_same(left.get("add_generation_prompt"), not left.get("continue_final_message", False)):
        del left["add_generation_prompt"]
    if not left.get("tools"):
        if left.get("tool_choice") in ("none", "auto"):
            del left["tool_choice"]
        if left.get("parallel_tool_calls") is True:
            del left["parallel_tool_calls"]
    if isinstance(left.get("stop"), list):
        left["stop"] = [text for text in left["stop"] if text != ""]
    return left


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(isinstance(value, one) if isinstance(one, type) else _is_same(value, one) for one in neutral)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal and of one type: JSON's ``true`` is not 1."""
    return type(value) is type(other) and value == other

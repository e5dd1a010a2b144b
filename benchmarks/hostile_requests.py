"""Malicious requests: bodies made to take long, and extreme values of fields.

Tests send them one by one; ``benchmarks.hostile`` sends all of them for a while.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from vivace.serve.bodies import Body, ChatBody, CompletionBody, LoadLoraBody, UnloadLoraBody

MEGABYTE = 1_000_000
TEXT = "".join(random.Random(0).choices(string.ascii_lowercase + "  ,.\n", k=MEGABYTE))
Bomb = tuple[str, bytes, int]
"""Path, body and expected status of a request."""


def schema(of: dict[str, Any], **fields: Any) -> bytes:
    """Return a request for eighty short answers constrained to a schema."""
    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}
    return json.dumps({"prompt": ["a", "b", "c", "d", "e"], "n": 16, "max_tokens": 1, **bound, **fields}).encode()


def listed(field: str, element: str, last: str = "") -> bytes:
    """Return a body with a megabyte of one element."""
    count = MEGABYTE // (len(element) + 1)
    return f'{{"{field}": [{f"{element}," * count}{last or element}]}}'.encode()


def chain(length: int) -> dict[str, Any]:
    """Return schemas of which each refers to the next."""
    steps: dict[str, Any] = {
        f"d{place}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{place + 1}"}}}
        for place in range(length)
    }
    return {"$defs": {**steps, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


BOMBS: dict[str, Bomb] = {
    "20k values": ("/v1/completions", schema({"enum": [f"value {place} " + "x" * 8 for place in range(20_000)]}), 400),
    "6k values": ("/v1/completions", schema({"enum": [f"value {place} " + "x" * 8 for place in range(6_000)]}), 200),
    "a large factor": ("/v1/completions", schema({"type": "integer", "multipleOf": 1_000_003}), 400),
    "30 factors": ("/v1/completions", schema({"type": "object", "properties": {
        f"k{place}": {"type": "integer", "multipleOf": 99_991 - place} for place in range(30)}}), 400),
    "patterns": ("/v1/completions", schema({"type": "object", "patternProperties": {
        f"^{chr(97 + place % 26)}{place}.*[a-z]+{place}$": {"type": "integer"} for place in range(400)}}), 400),
    "a chain": ("/v1/completions", schema(chain(1600)), 400),
    "a wrong list": ("/v1/chat/completions", listed("messages", "1"), 400),
    "wrong messages": ("/v1/chat/completions", listed("messages", "{}"), 400),
    "right messages": ("/v1/chat/completions", listed("messages", '{"role":"user"}'), 400),
    "parts": ("/v1/chat/completions",
              b'{"messages": [{"role": "user", "content": ['
              + b'{"type":"text","text":""},' * 37_000 + b'{"type":"text","text":""}]}], "max_tokens": 1}', 200),
    "unknown fields": ("/v1/chat/completions",
                       json.dumps({f"x{place}": 1 for place in range(80_000)}).encode(), 400),
    "wrong biases": ("/v1/completions",
                     json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(70000), 200)}).encode(), 400),
    "biases": ("/v1/completions",
               json.dumps({"prompt": ["a"] * 5, "n": 16, "logit_bias": dict.fromkeys(range(70000), 1)}).encode(),
               400),
    "a long text": ("/v1/completions", json.dumps({"prompt": TEXT}).encode(), 400),
    "a long message": ("/v1/chat/completions",
                       json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode(), 400),
    "many tokens": ("/v1/completions", listed("prompt", "5"), 400),
    "lists": ("/v1/completions", listed("prompt", "[]"), 400),
    "depth": ("/v1/completions", b"[" * MEGABYTE, 400),
    "tokenize": ("/tokenize", json.dumps({"prompt": TEXT}).encode(), 200),
    "detokenize": ("/detokenize", listed("tokens", "5"), 200),
    "a large reply": ("/v1/completions", json.dumps(
        {"prompt": "a", "n": 16, "max_tokens": 200, "logprobs": 20, "ignore_eos": True, "seed": 1}).encode(), 200),
}  # fmt: skip


NUMBERS = (0, -0.0, 5e-324, 1e-300, 1e-40, 1e-8, 0.3, 1, 2, 7, 100, 1e8, 1e40, 1e300, 10**30, -1, -2)
ABSURD = (float("nan"), float("inf"), -float("inf"), 10**400, "1", "", [], {}, True)
COUNTS = (0, 1, 2, 3, 16, 17, 64, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -1)
SCHEMAS: tuple[Any, ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["a"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "^$"}}},
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHARED: Mapping[str, tuple[Any, ...]] = {
    "model": ("vivace", "nobody", ""),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": COUNTS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "logit_bias": ({}, {"0": -100}, {"0": 100, "5": -100}, {str(i): -100.0 for i in range(300)}, {"5": 1e-320},
                   {"99999": 1}, {"-1": 1}, {"1": 1e9}, {"7": float("nan")}),
    "min_tokens": COUNTS,
    "ignore_eos": (True, False),
    "stop": ("a", ["\n", " "], "\u0000", "\U0001f600", ["x"] * 17, ""),
    "stop_token_ids": ([0], list(range(300))[:256], [10**9], [-1]),
    "n": (0, 1, 2, 16, 17),
    "seed": (0, 2**62, 2**63 - 1, 2**63, -(2**63), -1),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {}),
    "response_format": SCHEMAS,
    "skip_special_tokens": (True, False),
    "return_token_ids": (True, False),
    "return_progress": (True, False),
    "return_trace": (True, False),
    "method": (
        "plain", "lookup", "multirate", "multirate+lookup", "auto", "draft", "layerskip", "lookahead", "quantized",
        "quantized+lookup", "",
    ),
    "prefill": ("full", "lazy", "static", "random", "lexical", "", "Lazy"),
    "keep": (
        "paper", "fast", "1:0.5:taught", "1:0.5:heads,2:0.5:", "1:0.5", "1:0.5,3:0.01", "3:0.5,1:0.5", "1:0",
        "1000:0.5", "", ":", "k" * 201,
    ),
    "min_prompt": COUNTS,
    "decode_keep": ("same", 0.5, 1, 0, 1.5, -1, 1e309, "half", "", "s" * 10000, [], {}),
    "num_draft_tokens": COUNTS,
    "quality": NUMBERS,
    "priority": (-1000, 1000, 1001, 0),
    "cache_salt": ("a", "", "\u0000", "a" * 200, "a" * 201),
    "user": ("", "u" * 1000),
    "safety_identifier": ("s",),
}  # fmt: skip
CHAT: Mapping[str, tuple[Any, ...]] = {
    "messages": (
        [{"role": "user", "content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": "user", "content": "x " * 2000}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 3,
        [],
    ),
    "max_completion_tokens": COUNTS,
    "max_tokens": COUNTS,
    "logprobs": (True, False),
    "top_logprobs": COUNTS,
    "tools": ([], [TOOL], [TOOL, TOOL]),
    "tool_choice": ("auto", "none", "required", TOOL),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({}, {"messages": []}, {"x": 1}),
    "continue_final_message": (True, False),
}
COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "prompt": ("abc", "", "\u0000", [1], [], [[]], [[1, 2], [3]], ["a"] * 65, [10**9], "x " * 2000, ["", "a"]),
    "max_tokens": COUNTS,
    "logprobs": COUNTS,
    "echo": (True, False),
    "use_beam_search": (True, False),
    "best_of": COUNTS,
    "length_penalty": (-100, -1.0, 0, 2.0, 100, 101),
    "early_stopping": (True, False, "never", "always"),
}
LORA: Mapping[str, tuple[Any, ...]] = {
    "lora_name": ("sql", "nobody", "vivace", "", "..", "a/b", "/", "\u0000", "n" * 100, "n" * 101, "a\nb", "%2e%2e"),
    "lora_path": ("sql", "nobody", "..", "../sql", "/etc", "sql/../sql", ".", "", "p" * 101, "a\\b", None),
}
ROUTES: Mapping[str, tuple[type[Body], Mapping[str, tuple[Any, ...]], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatBody,
        {**SHARED, **CHAT},
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6},
    ),
    "/v1/completions": (CompletionBody, {**SHARED, **COMPLETION}, {"prompt": "abc", "max_tokens": 6}),
    "/v1/load_lora_adapter": (LoadLoraBody, LORA, {"lora_name": "sql"}),
    "/v1/unload_lora_adapter": (UnloadLoraBody, {"lora_name": LORA["lora_name"]}, {"lora_name": "sql"}),
}


def fits(kind: type[Body], body: Mapping[str, Any]) -> bool:
    """Return whether a body is valid by itself."""
    try:
        kind.model_validate(body)
    except ValidationError:
        return False
    return True


@cache
def split_values(route: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the values of every field that are valid by themselves, and those that are not."""
    kind, fields, body = ROUTES[route]
    good = {name: [value for value in values if fits(kind, {**body, name: value})] for name, values in fields.items()}
    bad = {name: [value for value in values if value not in good[name]] for name, values in fields.items()}
    return {name: values for name, values in good.items() if values}, bad

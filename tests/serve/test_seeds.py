"""Texts with a seed: which method drafts for them, and that they are those of the engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import vivace
from tests.serve.conftest import Running
from vivace.engine import SHIPPED, Engine
from vivace.kernels.choice import choose
from vivace.prompts import packaged_prompts
from vivace.serve.app import Server
from vivace.serve.bodies import CompletionBody
from vivace.serve.config import ServeConfig
from vivace.serve.parsing import RequestParser

SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
DRAWN = {"temperature": 1.2, "top_p": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def shipped_engine() -> Engine:
    """The model that ships: in bfloat16, so that native code draws its tokens where there are native kernels."""
    return vivace.load(SHIPPED)


@pytest.fixture(scope="module")
def parser(shipped_engine: Engine) -> RequestParser:
    return Server(shipped_engine, ServeConfig(port=0)).asking


def method_of(parser: RequestParser, fields: dict[str, Any]) -> str:
    begun = parser.begin(CompletionBody, json.dumps({"prompt": "abc", "max_tokens": 8} | fields).encode())
    parsed = parser.finish(parser.go_on(begun, b"") if begun.takes_long else begun, b"")
    assert len({request.drafter for request in parsed.requests}) == 1
    return parsed.method


@pytest.mark.parametrize(
    "fields", [DRAWN, {"seed": 3, "temperature": 0}, {"seed": 3, "temperature": 0, "logit_bias": {"5": 1}}]
)
def test_auto_drafts_where_the_text_does_not_depend_on_drafts(parser: RequestParser, fields: dict[str, Any]) -> None:
    chain = parser.engine.model.backend.chain
    draws_natively = chain is not None and chain.draws_by_position
    assert method_of(parser, fields) == ("auto" if draws_natively or fields["temperature"] == 0 else "lookup")
    assert method_of(parser, fields | {"method": "multirate"}) == "multirate"


@pytest.mark.parametrize(
    "fields",
    [
        *({"min_p": 0.1}, {"top_k": 5}, {"logit_bias": {"5": 1}}, {"min_tokens": 2}, {"repetition_penalty": 1.2}),
        *({"presence_penalty": 0.5}, {"response_format": SCHEMA}),
    ],
)
def test_a_seed_settles_what_drafts_elsewhere(parser: RequestParser, fields: dict[str, Any]) -> None:
    assert method_of(parser, DRAWN | fields) == "lookup"
    assert method_of(parser, DRAWN | fields | {"seed": None}) == "auto"
    assert method_of(parser, DRAWN | fields | {"method": "multirate"}) == "multirate"


def test_a_seed_settles_what_drafts_where_native_code_does_not_draw(engine: Engine) -> None:
    assert engine.model.backend.chain is None, "this checkpoint is in float32"
    assert method_of(Server(engine, ServeConfig(port=0)).asking, DRAWN) == "lookup"


@pytest.mark.skipif(choose("auto").body is None, reason="no native kernels, so auto becomes lookup")
def test_what_auto_draws_with_a_seed_is_plain_decoding_s(shipped: Running, shipped_engine: Engine) -> None:
    prompts = [str(prompt.request) for prompt in packaged_prompts("e2e")[:4]]
    asked = {"max_tokens": 40, "model": "vivace-14m", **DRAWN}
    extra = {"return_token_ids": True, "method": "auto"}

    def answer(prompt: str) -> list[int]:
        return list(shipped.client().completions.create(prompt=prompt, **asked, extra_body=extra).choices[0].token_ids)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(answer, prompts))
    drawing = {"temperature": 1.2, "top_p": 0.9, "seed": 3, "max_new_tokens": 40, "method": "plain", "raw": True}
    assert texts == [list(shipped_engine.generate(prompt, **drawing)[0].token_ids) for prompt in prompts]

"""The tokens do not depend on who else is served."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.conftest import Running
from vivace.engine import Engine
from vivace.kernels.choice import choose
from vivace.prompts import packaged_prompts

PROMPTS = [str(prompt.request) for prompt in packaged_prompts("e2e")[:16]]
METHODS = ("plain", "lookup", "multirate", "auto")


def ask(client: OpenAI, place: int, model: str, method: str, num_tokens: int) -> list[int]:
    """Token ids of an answer, every other one streamed."""
    settings: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPTS[place]}],
        "max_tokens": num_tokens,
        "extra_body": {"return_token_ids": True, "method": method, "ignore_eos": True},
    }
    if place % 2:
        return list(client.chat.completions.create(**settings).choices[0].token_ids)
    chunks = client.chat.completions.create(**settings, stream=True)
    return [token for c in chunks for part in c.choices for token in (part.model_extra or {}).get("token_ids", [])]


def expected(engine: Engine, lengths: Sequence[int]) -> list[list[int]]:
    return [
        list(engine.generate(prompt, max_new_tokens=length, method="plain", ignore_eos=True)[0].token_ids)
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]


def test_alone_and_among_sixteen(client: OpenAI, engine: Engine) -> None:
    lengths = [8 + 3 * place for place in range(16)]
    wanted = expected(engine, lengths)
    models = [("tiny", "alpha", "beta")[place % 3] for place in range(16)]
    methods = [METHODS[place % 4] if models[place] != "tiny" else "lookup" for place in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda p: ask(client, p, models[p], methods[p], lengths[p]), range(16)))
    assert together == wanted
    assert [ask(client, place, models[place], methods[place], lengths[place]) for place in range(0, 16, 5)] == wanted[
        ::5
    ]


def test_long_prompts_and_drawn_text_do_not_depend_on_load(client: OpenAI, engine: Engine) -> None:
    """Prompts of several chunks, read while others decode, and seeds: alone and together the same."""
    prompts = [f"{place} " + "the quick brown fox jumps over the lazy dog " * (2 + 4 * place) for place in range(6)]
    drawn = {"temperature": 1.0, "max_tokens": 24}
    prompts_read = [len(engine.tokenizer.encode(prompt)) for prompt in prompts]
    assert max(prompts_read) > 2 * 256
    assert min(prompts_read) < 256

    def answer(place: int, salt: str) -> list[int]:
        extra = {"return_token_ids": True, "ignore_eos": True, "method": "plain", "cache_salt": f"{salt}{place}"}
        settings = {**drawn, "seed": place} if place >= 6 else {"max_tokens": 24, "temperature": 0}
        reply = client.completions.create(model="tiny", prompt=prompts[place % 6], **settings, extra_body=extra)
        return list(reply.choices[0].token_ids)

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda place: answer(place, "together"), range(12)))
    assert together == [answer(place, "alone") for place in range(12)]
    wanted = engine.generate(prompts, raw=True, max_new_tokens=24, ignore_eos=True, method="plain", batch_size=1)
    assert together[:6] == [list(one.token_ids) for one in wanted]


@pytest.mark.parametrize("stream", [False, True])
def test_one_pass_serves_all_rows(server: Running, client: OpenAI, stream: bool) -> None:
    passes, tokens = server.metric("vivace_target_passes_total"), server.metric("vivace_generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda place: ask(client, 2 * place + (not stream), "tiny", "plain", 100), range(8)))
    passes = server.metric("vivace_target_passes_total") - passes
    tokens = server.metric("vivace_generation_tokens_total") - tokens
    assert tokens == 800
    assert passes < tokens / 4


def test_a_shared_prompt_is_read_once(server: Running, client: OpenAI, engine: Engine) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 12
    settings: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "n": 4, "temperature": 0}
    hits = server.metric("vivace_prefix_cache_hits_total")
    reply = client.completions.create(**settings, extra_body={"cache_salt": "n", "return_token_ids": True})
    wanted = list(engine.generate(prompt, raw=True, max_new_tokens=12, method="plain")[0].token_ids)
    assert [choice.token_ids for choice in reply.choices] == [wanted] * 4
    assert server.metric("vivace_prefix_cache_hits_total") - hits == 3 * (reply.usage.prompt_tokens - 1)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0, "the request itself found nothing"
    longer = client.completions.create(
        model="tiny", prompt=prompt + "and on", max_tokens=12, extra_body={"cache_salt": "n", "return_token_ids": True}
    )
    before, after = (engine.tokenizer.encode(text) for text in (prompt, prompt + "and on"))
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    reads_rows = choose("auto").body is not None  # others share whole chunks
    assert longer.usage.prompt_tokens_details.cached_tokens == (common if reads_rows else 256)
    wanted = list(engine.generate(prompt + "and on", raw=True, max_new_tokens=12, method="plain")[0].token_ids)
    assert longer.choices[0].token_ids == wanted
    other = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "m"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0

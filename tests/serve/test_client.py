"""OpenAI's own client against a real server over real HTTP."""

from __future__ import annotations

import json
import math
from typing import cast

import openai
import pytest
from llguidance.hf import from_tokenizer
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.serve.conftest import Running
from vivace.engine import Engine

MESSAGES = [{"role": "user", "content": "Describe: name[Cotto], food[English]"}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "open": {"type": "boolean"}},
    "required": ["size", "open"],
    "additionalProperties": False,
}

METRICS = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket"),
    *("request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def test_models(client: OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["tiny", "alpha", "beta", "early"]
    assert cards["alpha"].parent == "tiny"
    assert client.models.retrieve("beta").max_model_len == 1024


def test_chat(client: OpenAI, engine: Engine) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=12)
    expected = engine.generate([MESSAGES], max_new_tokens=12, method="plain")[0]
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.usage.prompt_tokens == expected.stats.num_prompt_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streamed_text_is_the_text(client: OpenAI) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    ids = [token for part in parts for token in (part.model_extra or {}).get("token_ids", [])]
    assert ids == whole.choices[0].token_ids
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_goes_with_every_chunk(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=6, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_completion(client: OpenAI, engine: Engine) -> None:
    reply = client.completions.create(model="tiny", prompt=["one", "two words"], max_tokens=8, n=2)
    expected = engine.generate(["one", "two words"], max_new_tokens=8, raw=True, method="plain")
    assert [choice.text for choice in reply.choices] == [expected[0].text] * 2 + [expected[1].text] * 2
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


def test_a_prompt_may_be_tokens(client: OpenAI, engine: Engine) -> None:
    tokens = engine.tokenizer.encode("two words")
    by_text = client.completions.create(model="tiny", prompt="two words", max_tokens=8)
    by_tokens = client.completions.create(model="tiny", prompt=[tokens, tokens], max_tokens=8)
    assert {choice.text for choice in by_tokens.choices} == {by_text.choices[0].text}


def test_logprobs_are_the_models(client: OpenAI, engine: Engine) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    expected = engine.generate([MESSAGES], max_new_tokens=5, method="plain", logprobs=True)[0]
    content = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs, abs=1e-6)
    for entry in content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0]  # greedy


def test_bytes_put_the_text_together(client: OpenAI, engine: Engine) -> None:
    """Random tokens break characters apart; llguidance knows their bytes as well."""
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=80, temperature=3.0, seed=1, logprobs=True, top_logprobs=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    content, ids = reply.choices[0].logprobs.content, reply.choices[0].token_ids
    table = from_tokenizer(engine.tokenizer.inner)
    special = set(engine.tokenizer.inner.all_special_ids)
    for entry, token in zip(content, ids, strict=True):
        assert token in special or bytes(entry.bytes) == table.decode_bytes([token])
        assert all(len(top.bytes) > 0 for top in entry.top_logprobs)
    assert any("\N{REPLACEMENT CHARACTER}" in entry.token for entry in content)


def test_offsets_hold_where_tokens_break_characters(client: OpenAI) -> None:
    prompt = "Köln → 東京, é"
    settings = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "echo": True, "logprobs": 0, "temperature": 3.0}
    for stream in (False, True):
        found = client.completions.create(**settings, seed=2, stream=stream, extra_body={"ignore_eos": True})
        parts = [chunk.choices[0] for chunk in found if chunk.choices] if stream else [found.choices[0]]
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
        offsets = [at for part in parts if part.logprobs for at in part.logprobs.text_offset]
        assert offsets == sorted(offsets)
        assert len(tokens) == len(offsets) > 50
        for token, at in zip(tokens, offsets, strict=True):
            if "\N{REPLACEMENT CHARACTER}" not in token and not token.startswith("<|"):
                assert text.startswith(token, at), (token, at)


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI) -> None:
    """With all fields of the client's own message, most of which are null or empty."""
    question: ChatCompletionMessageParam = {"role": "user", "content": "a"}
    message = client.chat.completions.create(model="tiny", messages=[question], max_tokens=3).choices[0].message
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": [], "name": ""}
    for sent in (message, message.model_dump(), {**message.model_dump(), **empty}):
        turns = cast("list[ChatCompletionMessageParam]", [question, sent, question])
        assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=3).choices


def test_echo_scores_the_prompt(client: OpenAI, engine: Engine) -> None:
    prompt = "Describe: name[Cotto], food[English]"
    reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    measured = (reply.model_extra or {})["metrics"]
    assert (measured["time_to_first_token_ms"], measured["generation_time_ms"]) == (None, 0), "nothing was written"
    tokens = engine.tokenizer.encode(prompt)
    expected = engine.logits([tokens])[0, :-1].log_softmax(-1).gather(1, _column(tokens[1:]))[:, 0].tolist()
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == prompt
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == expected
    assert reply.usage.completion_tokens == 0
    assert max(map(len, found.tokens)) > 1
    assert [reply.choices[0].text[at:][:1] for at in found.text_offset] == [token[:1] for token in found.tokens]


def _column(tokens: list[int]) -> object:
    import torch

    return torch.tensor(tokens)[:, None]


def test_stop_cuts_at_the_text(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=30).choices[0].text
    stop = whole[7:9]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=30, stop=[stop, "never seen"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_a_seed_repeats_and_choices_differ(client: OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        reply = client.completions.create(model="tiny", prompt="abc", max_tokens=16, temperature=1.0, seed=seed, n=3)
        return [choice.text for choice in reply.choices]

    first = draw(5)
    assert first == draw(5)
    assert first != draw(6)
    assert len(set(first)) == 3
    assert first[1] == draw(6)[0], "choice i is drawn with seed + i"


@pytest.mark.parametrize("method", ["plain", "lookup", "multirate"])
def test_a_schema_binds_every_method(client: OpenAI, method: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="alpha", messages=MESSAGES, max_tokens=60, response_format=schema, extra_body={"method": method}
    )
    answer = json.loads(reply.choices[0].message.content)
    assert answer["size"] in ("small", "large")
    assert isinstance(answer["open"], bool)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.metrics["method"] == method


def test_a_schema_binds_drawn_text(client: OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, response_format=schema, temperature=1.5, seed=3, n=4
    )
    for choice in reply.choices:
        assert set(json.loads(choice.message.content)) == {"size", "open"}


def test_what_drafts_gave_is_counted(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="alpha", messages=MESSAGES, max_tokens=20, extra_body={"method": "multirate", "return_trace": True}
    )
    details, metrics = reply.usage.completion_tokens_details, reply.metrics["speculative_decoding"]
    assert details.accepted_prediction_tokens == metrics["num_accepted_draft_tokens"]
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == metrics["num_draft_tokens"] > 0
    trace = reply.choices[0].trace
    assert len(trace) == reply.usage.completion_tokens
    assert sum(token["accepted"] for token in trace) == metrics["num_accepted_draft_tokens"]
    assert (
        max(token["step"] for token in trace) + 1 == metrics["num_spec_steps"] == sum(metrics["acceptance_histogram"])
    )
    assert math.isclose(
        metrics["mean_acceptance_length"], 1 + details.accepted_prediction_tokens / metrics["num_spec_steps"]
    )


def test_where_tokens_left_is_told(client: OpenAI) -> None:
    settings = {"model": "early", "messages": MESSAGES, "max_tokens": 20}
    reply = client.chat.completions.create(
        **settings, extra_body={"method": "dynamic", "return_trace": True, "ignore_eos": True}
    )
    layers = [token["layer"] for token in reply.choices[0].trace]
    assert set(layers) == {1, 2}, "most left at the gate, some went to the top"
    exits = reply.metrics["early_exits"]
    assert exits["share"] == layers.count(1) / len(layers)
    assert exits["mean_exit_layer"] == sum(layers) / len(layers)
    whole = client.chat.completions.create(**settings, extra_body={"method": "plain", "return_trace": True})
    assert {token["layer"] for token in whole.choices[0].trace} == {None}
    assert whole.metrics["early_exits"] is None


@pytest.mark.parametrize(
    ("settings", "kind", "param"),
    [
        ({"model": "tinny"}, openai.NotFoundError, "model"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "ab " * 2000}]}, openai.BadRequestError, "messages"),
        ({"extra_body": {"method": "dynamic", "model": "early", "quality": 0.5}}, openai.BadRequestError, "quality"),
        ({"extra_body": {"method": "plain", "quality": 0.9}}, openai.BadRequestError, "quality"),
        ({"extra_body": {"method": "moo"}}, openai.BadRequestError, "method"),
        ({"extra_body": {"draft_model": "/etc"}}, openai.BadRequestError, "draft_model"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "a": 1}]}, openai.BadRequestError, "tools.0.a"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
         openai.BadRequestError, "response_format"),
    ],
)  # fmt: skip
def test_errors_name_the_field(
    client: OpenAI, settings: dict[str, object], kind: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **settings})
    assert caught.value.param == param
    assert "Traceback" not in caught.value.response.text
    assert "/" not in caught.value.message.replace("input/output", ""), "no path of the server is told"


def test_metrics_have_the_usual_names(server: Running) -> None:
    text = server.http().get("/metrics").text
    for prefix in ("vivace_", "vllm:"):
        for stem in METRICS:
            assert f"\n{prefix}{stem}{{" in text, prefix + stem
    assert 'finished_reason="length",model_name="tiny"' in text


def test_tokens_there_and_back(server: Running) -> None:
    with server.http() as http:
        found = http.post("/tokenize", json={"prompt": "two words"}).json()
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "two words"}
        assert found["count"] == len(found["tokens"])
        assert http.post("/tokenize", json={"messages": MESSAGES}).json()["count"] > 0
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json()["version"]
        assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"

"""What stands beside the texts: counts, tokens, log-probabilities; and what must not keep a text from coming."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.serve.conftest import local
from vivace.engine import Engine
from vivace.serve.config import ServeConfig
from vivace.serve.lanes import Lane


def completion(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json={"max_tokens": 4, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_what_a_request_took_from_a_cache_counts_once_for_each_prompt(http: httpx2.Client) -> None:
    first, second = "never said before " * 3, "nor was this one " * 3
    fresh = completion(http, prompt=first, n=3, temperature=1, cache_salt="counts")["usage"]
    assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
    completion(http, prompt=second, cache_salt="counts")
    both = completion(http, prompt=[first, second], n=2, temperature=1, cache_salt="counts")["usage"]
    assert both["prompt_tokens_details"]["cached_tokens"] == both["prompt_tokens"] - 2


def test_each_choice_has_the_tokens_of_its_prompt(http: httpx2.Client) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    found = completion(http, prompt=prompts, n=2, temperature=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert found["prompt_token_ids"] == [5, 6, 7]
    alone = completion(http, prompt=prompts[1], return_token_ids=True)
    assert (alone["prompt_token_ids"], "prompt_token_ids" in alone["choices"][0]) == ([8, 9], False)


def test_bytes_that_are_no_text_have_keys_of_their_own(http: httpx2.Client) -> None:
    found = completion(http, prompt="a", logprobs=20, max_tokens=12, ignore_eos=True)["choices"][0]["logprobs"]
    assert any(key.startswith("bytes:\\x") for top in found["top_logprobs"] for key in top)
    assert not any("\N{REPLACEMENT CHARACTER}" in key for top in found["top_logprobs"] for key in top)


def test_a_special_token_that_is_shown_stops(http: httpx2.Client) -> None:
    shown = {"prompt": "a", "logit_bias": {"1": 100}, "skip_special_tokens": False}
    [choice] = completion(http, **shown)["choices"]
    spelt = choice["text"][: len(choice["text"]) // 4]
    assert choice["text"] == spelt * 4
    [choice] = completion(http, **shown, stop=spelt)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_arguments_that_are_nested_too_deeply_are_text(http: httpx2.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "[" * 50_000}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    reply = http.post("/v1/chat/completions", json={"messages": [*messages, messages[0]], "max_tokens": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_is_complete_is_sent_however_many_wait(engine: Engine) -> None:
    with local(engine, ServeConfig(served_model_name="tiny")) as running, running.http() as client:
        lane: Lane = running.server.texts
        taken = running.server.worker.submit

        def fill(*given: Any, **settings: Any) -> Any:
            lane._num_open = lane._max_open  # others came while this one was decoded
            return taken(*given, **settings)

        running.server.worker.submit = fill  # type: ignore[method-assign]
        assert completion(client, prompt="a")["choices"][0]["text"]
        reply = client.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")

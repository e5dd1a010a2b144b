"""Beam search over HTTP: the texts and scores of the engine, streamed as far as no beam can change them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import vivace
from tests.serve.conftest import Local, local
from tests.test_encoder_decoders import SOURCES, make
from vivace.decode.request import Emitted
from vivace.engine import Engine
from vivace.serve.answering import apart
from vivace.serve.config import ServeConfig

NAME = "served"
ENUM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
ASKED = {"use_beam_search": True, "length_penalty": 2.0, "early_stopping": "never", "best_of": 4}


@pytest.fixture(scope="module", params=["shared", "el"])
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return vivace.load(make(tmp_path_factory.mktemp("t5"), "t5"), attention=request.param)


@pytest.fixture(scope="module")
def translating(translator: Engine) -> Iterator[Local]:
    with local(translator, ServeConfig(served_model_name=NAME)) as running:
        yield running


@pytest.fixture(scope="module")
def describing(folder: Path) -> Iterator[tuple[Engine, Local]]:
    engine = vivace.load(folder / "tiny")
    with local(engine, ServeConfig(served_model_name=NAME, method="plain")) as running:
        yield engine, running


def found(client: OpenAI, prompt: str, n: int, **asked: Any) -> list[tuple[str, float]]:
    reply = client.completions.create(model=NAME, prompt=prompt, n=n, max_tokens=12, extra_body=ASKED | asked)
    return [(choice.text, (choice.model_extra or {})["score"]) for choice in reply.choices]


def streamed(client: OpenAI, prompt: str, n: int) -> tuple[list[str], list[str | None]]:
    texts = [""] * n
    reasons: list[str | None] = [None] * n
    chunks = client.completions.create(model=NAME, prompt=prompt, n=n, max_tokens=12, extra_body=ASKED, stream=True)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return texts, reasons


def expected(engine: Engine, prompt: str, n: int) -> list[tuple[str, float | None]]:
    settings: dict[str, Any] = {"num_beams": 4, "num_return_sequences": n, "length_penalty": 2.0}
    result = engine.generate(prompt, raw=True, early_stopping="never", max_new_tokens=12, **settings)[0]
    return [(result.text, result.score), *((one.text, one.score) for one in result.alternatives)]


@pytest.mark.parametrize("n", [1, 3])
def test_sources_get_the_engines_texts(translator: Engine, translating: Local, n: int) -> None:
    client = translating.client()
    for source in SOURCES:
        wanted = expected(translator, source, n)
        assert found(client, source, n) == wanted
        texts, reasons = streamed(client, source, n)
        assert texts == [text for text, _ in wanted]
        assert None not in reasons
    assert translating.metric("vivace_num_requests_running") == 0


def test_a_decoders_texts_and_a_plain_request_beside_them(describing: tuple[Engine, Local]) -> None:
    engine, running = describing
    client, prompt = running.client(), "Describe: name[Cotto], food[Indian]"
    assert found(client, prompt, 2) == expected(engine, prompt, 2)
    plain = client.completions.create(model=NAME, prompt=prompt, max_tokens=12)
    assert plain.choices[0].text == engine.generate(prompt, raw=True, max_new_tokens=12, method="plain")[0].text
    usage = client.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=12, extra_body=ASKED).usage
    assert usage is not None
    assert usage.completion_tokens > 12, "both choices are counted"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_beam_search": True}, "best_of of at least 2"),
        ({"length_penalty": 2.0}, "only with use_beam_search"),
        ({"best_of": 3}, "number of beams"),
        ({**ASKED, "n": 5}, "at least 5"),
        ({**ASKED, "logprobs": 1}, "logprobs is about single texts"),
        ({**ASKED, "temperature": 0.7}, "temperature draws tokens, and use_beam_search"),
        ({**ASKED, "top_p": 0.9}, "top_p draws tokens, and use_beam_search"),
        ({**ASKED, "best_of": 65}, "best_of"),
        ({**ASKED, "method": "lookup"}, "method is about single texts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    describing: tuple[Engine, Local], fields: dict[str, Any], says: str
) -> None:
    reply = describing[1].http().post("/v1/completions", json={"prompt": "a", "max_tokens": 3, **fields})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_an_encoder_refuses_what_it_has_no_use_for(translating: Local) -> None:
    for fields, says in (({"echo": True}, "the source of this one"), ({"method": "lookup"}, "without a source")):
        reply = translating.http().post("/v1/completions", json={"prompt": "a", "max_tokens": 3, **fields})
        assert reply.status_code == 400
        assert says in reply.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert translating.http().post("/v1/chat/completions", json=chat).status_code == 400
    assert translating.http().post("/v1/chat/completions", json={**chat, "use_beam_search": True}).status_code == 400


@pytest.mark.parametrize("fields", [{"temperature": 1}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"n": 2}])
def test_what_is_drawn_is_not_searched_for(folder: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Even where the checkpoint searches for texts of requests that say nothing."""
    shutil.copytree(folder / "tiny", tmp_path / "searching")
    (tmp_path / "searching" / "generation_config.json").write_text(json.dumps({"num_beams": 3}))
    with local(vivace.load(tmp_path / "searching"), ServeConfig()) as reached, reached.http() as http:
        scores = [
            "score" in http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, **more}).json()["choices"][0]
            for more in ({}, fields)
        ]
    assert scores == [True, False]


def test_choices_share_what_no_beam_can_change(translator: Engine) -> None:
    """Whatever the steps are, the parts of a choice are its text."""
    request = translator.request(SOURCES[2], vivace.engine.Options.of({"num_beams": 4, "num_return_sequences": 3}))
    session = translator.session([request], vivace.engine.Options())
    session.admit(request)
    parts: list[tuple[int, ...]] = [()] * 3
    last: Emitted | None = None
    for emitted in session.drain():
        own = apart(emitted, 3, len(parts[0]))
        parts = [part + one.tokens for part, one in zip(parts, own, strict=True)]
        last = emitted
    assert last is not None
    assert parts == [hypothesis.tokens for hypothesis in last.hypotheses]


@pytest.fixture(scope="module")
def searching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Local]]:
    """A server of a model that searches, for texts that are not too short, where nothing is said."""
    folder = make(tmp_path_factory.mktemp("searching"), "bart")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {
        "min_length": 14,
        "length_penalty": -2.0,
        "max_length": 20,
        "no_repeat_ngram_size": 0,
        "eos_token_id": [0, 121],
    }
    del settings["forced_bos_token_id"], settings["forced_eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    engine = vivace.load(folder)
    with local(engine, ServeConfig(served_model_name=NAME)) as running:
        yield engine, running


def answer(running: Local, **fields: Any) -> dict[str, Any]:
    reply = running.http().post("/v1/completions", json={"prompt": SOURCES[0], **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["choices"][0]
    return found


def test_what_the_checkpoint_says_holds_where_a_request_says_nothing(searching: tuple[Engine, Local]) -> None:
    engine, running = searching
    wanted = engine.generate(SOURCES[0], raw=True)[0]
    assert len(wanted.token_ids) >= 13
    found = answer(running)
    assert (found["text"], found["score"]) == (wanted.text, wanted.score)
    short = engine.generate(SOURCES[0], raw=True, min_new_tokens=0)[0]
    assert short.text != wanted.text
    assert answer(running, min_tokens=0)["text"] == short.text


@pytest.mark.parametrize("penalty", [1, 1.0, -2.0])
def test_a_length_penalty_of_one_is_not_the_checkpoints(searching: tuple[Engine, Local], penalty: float) -> None:
    engine, running = searching
    asked = {"length_penalty": float(penalty), "num_beams": 4, "min_new_tokens": 0}
    wanted = engine.generate(SOURCES[0], raw=True, **asked)[0]
    found = answer(running, use_beam_search=True, best_of=4, length_penalty=penalty, min_tokens=0)
    assert (found["text"], found["score"]) == (wanted.text, wanted.score)


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"return_trace": True}, {"response_format": ENUM}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_one_text_has_is_not_searched_for(searching: tuple[Engine, Local], fields: dict[str, Any]) -> None:
    assert "score" not in answer(searching[1], temperature=0.0, **fields)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_counts_the_answer_from_its_first_token(searching: tuple[Engine, Local], name: str) -> None:
    """The prompt of an encoder-decoder is its source, of which the answer repeats nothing yet."""
    _, running = searching
    usual = answer(running, temperature=0.0, logprobs=0, ignore_eos=True, return_token_ids=True)
    twice = [token for index, token in enumerate(usual["token_ids"]) if token in usual["token_ids"][:index]]
    assert twice, "the text of this model repeats itself"
    less = answer(running, temperature=0.0, logprobs=0, ignore_eos=True, return_token_ids=True, **{name: 2.0})
    assert less["token_ids"] != usual["token_ids"]


def test_a_search_without_a_limit_takes_the_room_that_there_is(
    searching: tuple[Engine, Local], describing: tuple[Engine, Local]
) -> None:
    """Beams share the entries of a slot."""
    _, running = describing
    room = running.server.max_model_len
    found = running.http().post(
        "/v1/completions",
        json={"prompt": "name[Cotto]", "use_beam_search": True, "n": 2, "best_of": 4, "ignore_eos": True},
    )
    assert found.status_code == 200, found.text
    assert 2 < found.json()["usage"]["completion_tokens"] <= 2 * room // 4
    assert answer(searching[1], use_beam_search=True, best_of=20, min_tokens=0)["text"]

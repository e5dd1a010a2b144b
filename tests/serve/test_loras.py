"""LoRAs behind HTTP: chosen by ``model``, loaded and unloaded from one folder, swapped under a limit of memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import vivace
from tests.adapters.loras import make_lora
from tests.serve.conftest import Local, local
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.serve.app import Server
from vivace.serve.bodies import CompletionBody
from vivace.serve.config import ServeConfig

KEY = "k" * 20
NAMES = ("a", "b", "c", "d")
SAME: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "tiny", layers=4)


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folder")
    for seed, name in enumerate(NAMES):
        make_lora(place / name, base, seed=seed)
    return place


def opened(base: Path, **how: Any) -> Engine:
    return vivace.load(base, dtype="bfloat16", **how)


@pytest.fixture(scope="module")
def reached(base: Path, folder: Path) -> Iterator[Local]:
    """Room for two and a half of them; two are served from the beginning."""
    engine = opened(base, adapters={"a": folder / "a", "b": folder / "b"})
    room = engine.adapters.num_bytes // 2 * 5 // 2
    config = ServeConfig(
        api_keys=(KEY,), adapter_bytes=room, adapter_folder=folder, served_model_name="tiny", num_slots=4
    )
    with local(engine, config) as running:
        yield running


@pytest.fixture
def http(reached: Local) -> Iterator[httpx2.Client]:
    with reached.http() as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client
        for name in ("c", "d", "e"):
            client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def answer(http: httpx2.Client, model: str, prompt: str = "the quick", **fields: Any) -> list[int]:
    reply = http.post("/v1/completions", json={"model": model, "prompt": prompt, **SAME, **fields})
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def alone(base: Path, folder: Path) -> dict[str, list[int]]:
    """What each writes by itself, in an engine of its own."""
    engine = opened(base, adapters={name: folder / name for name in NAMES})
    given: dict[str, Any] = {"raw": True, "max_new_tokens": 12, "method": "plain"}
    return {
        name or "tiny": list(engine.generate("the quick", adapter=name, **given)[0].token_ids)
        for name in (None, *NAMES)
    }


def test_model_chooses(http: httpx2.Client, alone: dict[str, list[int]]) -> None:
    for method in ("plain", "lookup", "auto"):
        for name in ("a", "tiny", "b"):
            assert answer(http, name, method=method) == alone[name]
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "a", "b"]
    assert [cards[name]["parent"] for name in cards] == [None, "tiny", "tiny"]
    assert http.get("/v1/models/a").json()["root"] == "tiny"
    reply = http.post("/v1/completions", json={"model": "z", "prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_chats_streams_and_several_choices(http: httpx2.Client, base: Path, folder: Path) -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 12}
    whole = http.post("/v1/chat/completions", json=body).json()
    expected = opened(base, adapters={"a": folder / "a"}).generate("the quick", adapter="a", max_new_tokens=12)[0].text
    assert (whole["model"], whole["choices"][0]["message"]["content"]) == ("a", expected)
    lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    assert "".join(p[0]["delta"].get("content") or "" for p in pieces if p) == expected
    drawn = {"temperature": 1.2, "seed": 3, "n": 3}
    reply = http.post("/v1/completions", json={"model": "a", "prompt": "the quick", **SAME, **drawn}).json()
    singles = [answer(http, "a", temperature=1.2, seed=3 + choice) for choice in range(3)]
    assert [choice["token_ids"] for choice in reply["choices"]] == singles


def test_echoed_prompts_are_scored_by_the_adapted_model(http: httpx2.Client, base: Path, folder: Path) -> None:
    body = {"prompt": "the quick brown", "echo": True, "logprobs": 1, "max_tokens": 0}
    found = http.post("/v1/completions", json={"model": "a", **body}).json()["choices"][0]["logprobs"]
    engine = opened(base, adapters={"a": folder / "a"})
    ids = engine.tokenizer.encode("the quick brown")
    logits = engine.logits([ids], adapter="a")[0].log_softmax(-1)
    wanted = [float(logits[place, token]) for place, token in enumerate(ids[1:])]
    assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
    bare = http.post("/v1/completions", json={"model": "tiny", **body}).json()["choices"][0]["logprobs"]
    assert bare["token_logprobs"] != found["token_logprobs"]


def test_loading_and_unloading(http: httpx2.Client, alone: dict[str, list[int]]) -> None:
    reply = http.post("/v1/load_lora_adapter", json={"lora_name": "c"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "e", "lora_path": "d"}).status_code == 200
    assert answer(http, "c") == alone["c"]
    assert answer(http, "e") == alone["d"]
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "a", "b", "c", "e"]
    reply = http.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
    assert http.post("/v1/completions", json={"model": "c", "prompt": "a"}).status_code == 404


def test_a_lora_whose_draft_weights_are_broken_is_not_loaded(http: httpx2.Client, folder: Path) -> None:
    (folder / "d" / "drafting" / "x").mkdir(parents=True)
    try:
        reply = http.post("/v1/load_lora_adapter", json={"lora_name": "d"})
    finally:
        shutil.rmtree(folder / "d" / "drafting")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_path")
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "a", "b"]


def test_what_is_worn_by_default_is_worn_over_http(tmp_path: Path) -> None:
    """An adapter that recovers what few bits have lost, and a name with a slash."""
    place = make_checkpoint(tmp_path / "rounded", layers=4)
    make_lora(place / "adapters" / "recovery", place, seed=5)
    given: dict[str, Any] = {"raw": True, "max_new_tokens": 12, "method": "plain"}
    worn, bare = (opened(place, recovery=each).generate("the quick", **given)[0].token_ids for each in (True, False))
    assert worn != bare
    for recovery, wanted in ((True, worn), (False, bare)):
        config = ServeConfig(served_model_name="org/tiny")
        with local(opened(place, recovery=recovery), config) as running, running.http() as client:
            assert answer(client, "org/tiny") == list(wanted)
            assert client.get("/v1/models/org/tiny").json()["id"] == "org/tiny"


def test_what_all_requests_wear_is_not_unloaded_and_choices_wait_each_for_themselves(
    reached: Local, http: httpx2.Client
) -> None:
    catalog, registry = reached.server.asking.catalog, reached.server.engine.adapters
    registry.default = "b"
    try:
        reply = http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "adapter_in_use")
        assert answer(http, "tiny") == answer(http, "b")
    finally:
        registry.default = None
    body = json.dumps({"model": "a", "prompt": "the quick", "n": 2, "temperature": 1.0}).encode()
    begun = reached.server.asking.begin(CompletionBody, body)
    parsed = reached.server.asking.finish(begun, b"")
    first, second = (request.adapter for request in parsed.requests)
    assert first is not second
    assert catalog.is_lora("a")


def test_swapping_under_load(reached: Local, http: httpx2.Client, alone: dict[str, list[int]]) -> None:
    """Four adapters and the base at once, room for two: everybody gets its own text, and memory stays within."""
    for name in ("c", "d"):
        assert http.post("/v1/load_lora_adapter", json={"lora_name": name}).status_code == 200
    asked = [("tiny", *NAMES)[place % 5] for place in range(40)]
    most: list[int] = []

    def ask(name: str) -> list[int]:
        found = answer(http, name, method=("plain", "lookup")[len(most) % 2])
        most.append(reached.server.engine.adapters.num_bytes)
        return found

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, asked)) == [alone[name] for name in asked]
    registry = reached.server.engine.adapters
    assert max(most) <= (registry.max_bytes or 0)
    assert registry.num_evicted > 3


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("load", {"lora_name": "a"}, 409, "the name 'a' is taken"),
        ("load", {"lora_name": "tiny", "lora_path": "a"}, 409, "the name 'tiny' is taken"),
        ("load", {"lora_name": "nobody"}, 404, "there is no adapter 'nobody'"),
        ("load", {"lora_name": "x", "lora_path": "../folder/a"}, 400, "no path and no link"),
        ("load", {"lora_name": "x", "lora_path": ".."}, 400, "no path and no link"),
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 400, "no path and no link"),
        ("load", {"lora_name": "x y", "lora_path": "a"}, 400, "cannot name an adapter"),
        ("load", {"lora_name": "x", "lora_path": "link"}, 400, "no path and no link"),
        ("load", {"lora_name": "x", "lora_path": "linked"}, 400, "has links among its files"),
        ("load", {"lora_name": "x", "lora_path": "broken"}, 400, "is truncated or not safetensors"),
        ("load", {"lora_name": "x", "lora_path": "large"}, 400, "more than the"),
        ("load", {"lora_name": "x", "lora_path": "other"}, 400, "was trained on base"),
        ("load", {}, 400, "lora_name is missing"),
        ("load", {"lora_name": "x", "lora_int_id": 1}, 400, "the field 'lora_int_id' is not supported"),
        ("unload", {"lora_name": "nobody"}, 404, "there is no adapter 'nobody'"),
        ("unload", {"lora_name": "tiny"}, 404, "there is no adapter 'tiny'"),
    ],
)
def test_what_is_refused(
    http: httpx2.Client, base: Path, folder: Path, route: str, body: dict[str, Any], status: int, says: str
) -> None:
    """In one sentence that names no path of the server's."""
    if not (folder / "link").exists():
        (folder / "link").symlink_to(folder / "a")
        (folder / "linked").mkdir()
        for file in (folder / "a").iterdir():
            (folder / "linked" / file.name).symlink_to(file)
        make_lora(folder / "broken", base)
        weights = folder / "broken" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:99])
        make_lora(folder / "large", base, rank=40)
        make_lora(folder / "other", make_checkpoint(folder / "base", seed=5, layers=4))
    reply = http.post(f"/v1/{route}_lora_adapter", json=body)
    assert reply.status_code == status, reply.text
    message = reply.json()["error"]["message"]
    assert says in message
    assert "\n" not in message
    assert str(folder) not in message


def test_one_in_use_stays(reached: Local, http: httpx2.Client) -> None:
    long = {"model": "b", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as reply:
        lines = reply.iter_lines()
        next(lines)
        reply_to_unload = http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        rest = list(lines)
    assert reply_to_unload.status_code == 409
    assert reply_to_unload.json()["error"]["code"] == "adapter_in_use"
    assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest
    assert answer(http, "b")


def test_servers_without_a_folder_or_a_key(base: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_folder lets callers load adapters; give --api-key-file"):
        ServeConfig(adapter_folder=folder)
    with pytest.raises(ConfigError, match="there is no directory"):
        ServeConfig(adapter_folder=folder / "nowhere", api_keys=(KEY,))
    with local(opened(base), ServeConfig()) as closed, closed.http() as http:
        for route, name in (("load", "a"), ("unload", "a")):
            reply = http.post(f"/v1/{route}_lora_adapter", json={"lora_name": name})
            assert reply.status_code == 403
            assert "--adapter-folder" in reply.json()["error"]["message"]


def test_two_models_of_one_name(base: Path, folder: Path, tmp_path: Path) -> None:
    config = ServeConfig(served_model_name="a")
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        Server(opened(base), config, {"a": folder / "a"})
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        Server(opened(base, adapters={"a": folder / "a"}), config)
    drafts = make_adapter(tmp_path / "multirate", base)
    both = Server(opened(base), ServeConfig(served_model_name="tiny"), {"drafts": drafts, "a": folder / "a"})
    assert both.catalog.names() == ["tiny", "drafts", "a"]

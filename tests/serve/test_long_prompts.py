"""A long prompt among streams: ids are those it has alone, however it is read, and a cancelled one stops at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.serve.conftest import Local, local
from tests.tiny_checkpoints import make_checkpoint
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.serve.config import ServeConfig

PROMPT = [1 + (11 * place + place // 7) % 290 for place in range(1500)]
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lazy": {"prefill": "lazy", "keep": "1:0.5,2:0.4"},
    "fastkv": {"prefill": "fastkv", "keep": "2:0.4:0.2"},
}
STREAMS = 8
GREEDY: dict[str, Any] = {"method": "plain", "do_sample": False, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), context=2048, layers=4)
    return vivace.load(folder)


def stream(server: Local, number: int) -> list[int]:
    """Ids of a stream."""
    body = {"prompt": PROMPT[number : number + 12], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    ids: list[int] = []
    asked = {**body, "stream": True, "return_token_ids": True}
    with server.http().stream("POST", "/v1/completions", json=asked) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    return ids


@pytest.mark.parametrize("budget", [256, 64])
def test_ids_beside_eight_streams_are_those_of_an_answer_alone(engine: Engine, budget: int) -> None:
    """With chunks as a whole, and divided by layers."""
    own = [PROMPT[number : number + 12] for number in range(STREAMS)]
    wanted = [list(engine.generate(p, **GREEDY, max_new_tokens=60)[0].token_ids) for p in own]
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    with (
        local(engine, ServeConfig(method="plain", prefill_budget=budget)) as server,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        for way in WAYS.values():
            running = [pool.submit(stream, server, number) for number in range(STREAMS)]
            reply = server.http().post("/v1/completions", json={**body, **way}).json()
            alone = engine.generate(PROMPT, **GREEDY, max_new_tokens=8, **way)[0].token_ids
            assert tuple(reply["choices"][0]["token_ids"]) == alone
            assert [each.result() for each in running] == wanted


@pytest.mark.parametrize("name", WAYS)
def test_a_cancelled_prompt_reads_no_further_piece(engine: Engine, name: str) -> None:
    session = Session(engine.model, num_slots=2, capacity=1600)
    beside = session.admit(engine.request(PROMPT[:9], Options.of({**GREEDY, "max_new_tokens": 40})))
    session.step()
    request = engine.request(PROMPT, Options.of({**GREEDY, "max_new_tokens": 8, **WAYS[name]}))
    number = session.admit(request)
    passes: list[int] = []
    state = session._prompts.state_of(request.prefill)
    read = state.read

    def counted(pieces: Any, prompts: Any) -> Any:
        passes.append(max(piece.stop - piece.first for piece in pieces.values()))
        return read(pieces, prompts)

    state.read = counted  # type: ignore[method-assign]
    while len(passes) < 3:
        session.step()
    session.cancel(number)
    tokens = 0
    while not session.is_idle:
        for emitted in session.step():
            assert emitted.request_id == beside or not emitted.tokens
            tokens += len(emitted.tokens)
    assert len(passes) == 3, "pieces after it was cancelled"
    assert max(passes) <= 256, "a piece is no longer than a chunk"
    assert tokens > 20, "the other went on"
    assert not session.cache.has_pruned


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("budget", [64, 50])
def test_chunks_that_are_divided_by_layers_have_the_same_bits(engine: Engine, name: str, budget: int) -> None:
    """Pieces are shorter, and nothing else changes."""
    made = Options.of({**GREEDY, "max_new_tokens": 8, "logprobs": True, **WAYS[name]})
    found: list[Any] = []
    for rows in (256, budget):
        session = Session(engine.model, num_slots=2, capacity=1600, prefill_budget=rows)
        session.admit(engine.request(PROMPT, made))
        session.admit(engine.request(PROMPT[:700], made))
        steps, events = 0, list[Any]()
        while not session.is_idle:
            events += session.step()
            steps += 1
        texts = [(e.request_id, e.tokens, e.logprobs) for e in sorted(events, key=lambda e: e.request_id)]
        found.append((steps, texts, events[-1].stats.num_prompt_layer_passes))
    assert found[0][1:] == found[1][1:]
    assert found[1][0] > found[0][0]

"""Soft prompts behind HTTP: each request gets its own, its choice stands in the metrics, and limits count it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vivace
from tests.adapters.loras import make_lora
from tests.serve.conftest import Local, local
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.pool.pool import PromptPool
from vivace.engine import Engine
from vivace.serve.config import ServeConfig


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = vivace.load(make_checkpoint(tmp_path_factory.mktemp("pool") / "tiny", context=128), dtype="bfloat16")
    generator = torch.Generator().manual_seed(3)
    rows = {name: torch.randn(count, 32, generator=generator) for name, count in (("short", 4), ("long", 20))}
    engine.prompt_pool = PromptPool(engine.model, rows, engine.memory)
    return engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Local]:
    with local(engine, ServeConfig(served_model_name="tiny", num_slots=4)) as server:
        yield server


def test_requests_get_what_they_get_in_python(engine: Engine, running: Local) -> None:
    asked = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with running.http() as http:
        for prompt in ("the quick brown", "aaaa bbbb", "x"):
            [want] = engine.generate(prompt, raw=True, max_new_tokens=12, ignore_eos=True)
            for _ in range(2):  # the second time behind kept entries
                reply = http.post("/v1/completions", json={"prompt": prompt, **asked}).json()
                assert tuple(reply["choices"][0]["token_ids"]) == want.token_ids
                assert reply["metrics"]["prompt_pool"] == want.stats.prompt_pool
                assert reply["usage"]["prompt_tokens"] == want.stats.num_prompt_tokens


def test_a_prompt_that_does_not_fit_behind_it_is_refused(running: Local) -> None:
    with running.http() as http:
        reply = http.post("/v1/completions", json={"prompt": [5] * 120, "max_tokens": 8})
        assert reply.status_code == 400
        assert "behind a soft prompt of" in reply.json()["error"]["message"]
        open_end = http.post("/v1/completions", json={"prompt": [5] * 90, "ignore_eos": True})
        assert open_end.status_code == 200, open_end.text
        assert open_end.json()["choices"][0]["finish_reason"] == "length"


def test_a_request_with_a_lora_stands_behind_none_and_has_the_whole_room(engine: Engine, tmp_path: Path) -> None:
    """Soft prompts were trained on the base alone."""
    engine.adapters.add("l1", make_lora(tmp_path / "l1", engine.folder))
    with local(engine, ServeConfig(served_model_name="tiny", num_slots=4)) as server, server.http() as http:
        asked = {"model": "l1", "prompt": [5] * 20, "ignore_eos": True}
        fits = http.post("/v1/completions", json={**asked, "max_tokens": 105})
        assert fits.status_code == 200, fits.text
        assert fits.json()["usage"]["completion_tokens"] == 105
        assert fits.json()["metrics"]["prompt_pool"] is None
        assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 108
        beams = {"use_beam_search": True, "n": 2, "max_tokens": 3}
        assert http.post("/v1/completions", json={**asked, **beams}).status_code == 200
    engine.adapters.remove("l1")

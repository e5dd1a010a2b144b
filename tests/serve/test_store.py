"""A server over a store under a budget: as many answers at once as there is room for, and a disk that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import vivace
from tests.serve.conftest import local
from tests.storage.stored import broken as failing
from vivace.decode.memory import text_bytes
from vivace.engine import Engine
from vivace.serve.app import Server
from vivace.serve.config import ServeConfig
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.store import open_store

CONFIG = ServeConfig(method="plain", max_model_len=200, prefix_cache_bytes=0)
ASK = {"model": "vivace", "prompt": "aka", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(folder / "tiny", tmp_path_factory.mktemp("stored") / "store").folder


@pytest.fixture
def stored(store: Path) -> Iterator[Engine]:
    whole = plan_memory(open_store(store), None, 1024).num_bytes
    engine = vivace.load(store, memory=int(0.96 * whole), reader="buffered", kernels="torch")
    yield engine
    assert engine.storage is not None
    engine.storage.close()


def test_a_server_keeps_to_its_budget(stored: Engine) -> None:
    server = Server(stored, CONFIG)
    assert server.max_model_len == 200
    room, drafter = stored.memory.room_bytes, server.catalog.drafter("vivace", "plain", None)
    assert room is not None
    assert room // text_bytes(stored.model, drafter, 200) == 3
    longest = stored.memory.longest_text(stored.model, drafter, 10_000)
    assert 1024 <= longest < 1200, "the plan leaves room for one text of the whole context"
    assert Server(stored, ServeConfig(prefix_cache_bytes=0)).max_model_len == 1024


def test_a_disk_that_fails_is_told_and_the_next_answer_is_right(
    stored: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored.storage is not None
    with local(stored, CONFIG) as server:
        plain = server.http().post("/v1/completions", json=ASK).json()["choices"][0]["text"]
        with failing(stored.storage.reader.reader, tmp_path):
            broken = server.http().post("/v1/completions", json=ASK)
        assert broken.status_code == 500
        assert broken.json()["error"]["message"] == "the server could not do this; its log says why"
        assert "Is a directory; check the disk" in caplog.text
        assert server.http().post("/v1/completions", json=ASK).json()["choices"][0]["text"] == plain

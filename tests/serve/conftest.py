"""A real server process on a tiny checkpoint, clients of it, and the engine that it must agree with."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx2
import pytest
import torch
import uvicorn
from openai import OpenAI

import vivace
from benchmarks.lateness import Lateness
from benchmarks.server_process import server_process
from tests.serve.lag import loop_lag
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.load import load_config
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.engine import SHIPPED, Engine
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig
from vivace.serve.app import Server, build
from vivace.serve.config import ServeConfig


@dataclass(frozen=True)
class Reached:
    """A server somewhere."""

    url: str

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60)

    def metric(self, name: str) -> float:
        text = self.http().get("/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line))

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, f"not within {timeout_s} s"
            time.sleep(0.05)

    def wait_idle(self) -> None:
        names = ("vivace_num_requests_running", "vivace_num_requests_waiting")
        self.wait_until(lambda: all(self.metric(name) == 0 for name in names))

    @property
    def is_running(self) -> bool:
        return self.metric("vivace_num_requests_running") > 0


@dataclass(frozen=True)
class Running(Reached):
    """A server process of its own."""

    process: subprocess.Popen[str]
    log: Path


@dataclass(frozen=True)
class Local(Reached):
    """A server in this process."""

    server: Server

    def lag(self) -> AbstractContextManager[Lateness]:
        """How late its event loop is, for the length of a block."""
        assert self.server.calls.loop is not None
        return loop_lag(self.server.calls.loop)


@contextmanager
def local(engine: Engine, config: ServeConfig) -> Iterator[Local]:
    """A server in this process, on a real socket."""
    server = Server(engine, replace(config, port=0))
    inner = uvicorn.Server(server.connections.settings(build(server)))
    thread = threading.Thread(target=inner.run)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not inner.started:
            assert time.monotonic() < until
            time.sleep(0.02)
        host, port = inner.servers[0].sockets[0].getsockname()[:2]
        yield Local(f"http://{host}:{port}", server)
    finally:
        inner.should_exit = inner.force_exit = True
        thread.join()


@contextmanager
def serving(folder: Path, log: Path, *words: str, stdin: str = "") -> Iterator[Running]:
    """A server for the length of a block, which finds ``stdin`` on its standard input."""
    with server_process("--model", str(folder), *words, log=log, stdin=stdin, threads=1) as (url, process):
        yield Running(url, process, log)


DRAFTERS = [f"--adapter={path.name}={path}" for path in sorted((SHIPPED / "adapters").iterdir())]
"""Of the model that ships."""

TEMPLATE = """\
{%- if tools %}<|system|>Answer, or write
<tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}
{%- for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers go on to their limit more often than not, and two adapters."""
    place = tmp_path_factory.mktemp("served")
    make_checkpoint(place / "tiny", context=1024)
    (place / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    make_adapter(place / "alpha", place / "tiny", gate=1)
    make_adapter(place / "beta", place / "tiny", gate=1)
    make_exits(place / "early", place / "tiny")
    return place


def make_exits(folder: Path, checkpoint: Path) -> None:
    """Gates that everything passes at one quality, but for every ninth token, and nothing at another."""
    config = DynamicConfig(GatesConfig((GateConfig(1),), rank=2, bottleneck=4), RouterConfig(latent=4))
    plan = ExitPlan((ExitThresholds(0.9, (None,)), ExitThresholds(0.98, (-1.0,))))
    torch.manual_seed(3)
    tensors = DynamicWeights(config, load_config(checkpoint)).tensors()
    save_adapter(folder, "dynamic", base_hash(checkpoint), asdict(plan), asdict(config), tensors)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Running]:
    adapters = [f"--adapter={name}={folder / name}" for name in ("alpha", "beta", "early")]
    with serving(folder / "tiny", folder / "log", *adapters, "--metrics-compat", "vllm") as running:
        yield running


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The model that ships, with all its drafters; answers whose length nobody says are short."""
    log = tmp_path_factory.mktemp("shipped") / "log"
    with serving(SHIPPED, log, *DRAFTERS, "--default-max-tokens", "16") as running:
        yield running


@pytest.fixture(scope="session")
def engine(folder: Path) -> Engine:
    return vivace.load(folder / "tiny", adapters=folder / "alpha")


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture
def http(server: Running) -> Iterator[httpx2.Client]:
    with server.http() as found:
        yield found

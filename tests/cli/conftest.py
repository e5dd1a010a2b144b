"""A fake engine behind the one seam of the command line, and a way to run it in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import vivace
from tests.cli.places import original as original
from tests.cli.places import place as place
from vivace.cli.app import run
from vivace.cli.console import console
from vivace.decode.memory import MemoryBudget


@dataclass
class FakeStats:
    method: str = "plain"
    num_tokens: int = 3
    num_first_tokens: int = 1
    num_prompt_tokens: int = 9
    num_cached_tokens: int = 0
    num_draft_tokens: int = 4
    num_accepted_draft_tokens: int = 2
    decode_s: float = 0.5
    early_exit_share: float | None = None
    prefill: str = "full"
    prefill_reason: str | None = None
    prompt_pool: str | None = None
    guard: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return 4.0

    @property
    def tokens_per_target_pass(self) -> float:
        return 1.5


@dataclass(frozen=True)
class FakeResult:
    text: str
    token_ids: list[int] = field(default_factory=lambda: [5, 6, 7])
    logprobs: list[float] | None = None
    finish_reason: str = "stop"
    method: str = "auto"
    choice: str | None = "lookup pays"
    stats: FakeStats = field(default_factory=FakeStats)
    score: float | None = None
    alternatives: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FakeChunk:
    text: str
    token_ids: list[int]
    result: FakeResult | None = None


class FakeEngine:
    """Answers every prompt with its last line in capitals; remembers what it was asked."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.defaults: dict[str, Any] = {}
        self.storage = None
        self.world = None
        self.notes: list[str] = []
        self.memory = MemoryBudget()
        self.model = SimpleNamespace(encoder=None)

    def check_has_no_encoder(self) -> None:
        """It has none."""

    def answer(self, request: Any) -> str:
        text = request if isinstance(request, str) else request[-1]["content"]
        return text.splitlines()[-1].upper()

    def generate(self, prompts: list[Any], **settings: Any) -> list[FakeResult]:
        self.asked += [(prompt, settings) for prompt in prompts]
        return [FakeResult(self.answer(prompt)) for prompt in prompts]

    def stream(self, prompt: Any, **settings: Any) -> Iterator[FakeChunk]:
        self.asked.append((list(prompt) if isinstance(prompt, list) else prompt, settings))
        text = self.answer(prompt)
        yield FakeChunk(text[:2], [5])
        yield FakeChunk(text[2:], [6, 7], FakeResult(text))


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def load(path: str | None, **choices: Any) -> FakeEngine:
        fake.opened = {"path": path, **choices}
        return fake

    monkeypatch.setattr(vivace, "load", load, raising=False)
    return fake


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    def call(*words: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = run([str(word) for word in words])
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    yield call
    console.is_quiet = False

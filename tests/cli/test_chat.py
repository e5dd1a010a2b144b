from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.conftest import FakeChunk, FakeEngine, Outcome
from vivace.errors import CapacityError

Cli = Callable[..., Outcome]


class Talk:
    """Stands for ``Conversation``: answers in capitals, three messages at most."""

    def __init__(self, engine: FakeEngine, *, system: str | None = None, **settings: Any) -> None:
        self.engine, self.opening = engine, [] if system is None else [system]
        self.reset()

    def reset(self) -> None:
        self.said = list(self.opening)

    def stream(self, line: str) -> Iterator[FakeChunk]:
        if len(self.said) == 3:
            raise CapacityError("too long; nothing was cut")
        self.said.append(line)
        yield from self.engine.stream(list(self.said))


@pytest.fixture(autouse=True)
def talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.conversation.Conversation", Talk)


@pytest.fixture
def engine(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(engine, "answer", lambda request: request[-1].upper())
    return engine


def test_every_line_is_a_turn_of_the_conversation(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("chat", "--system", "Be brief.", stdin="one\n\n two \n/reset\nthree\n/bye\nnever\n")
    assert outcome.out == "ONE\nTWO\nTHREE\n"
    asked = [said for said, _ in engine.asked]
    assert asked == [["Be brief.", "one"], ["Be brief.", "one", "two"], ["Be brief.", "three"]]


def test_a_conversation_that_is_too_long_is_told_and_goes_on(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("chat", stdin="a\nb\nc\nd\n/reset\ne\n")
    assert outcome.out == "A\nB\nC\nE\n"
    assert "too long; nothing was cut" in outcome.err


def test_unknown_commands_are_not_sent_to_the_model(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("chat", stdin="/rest\n")
    assert "no command /rest; /reset starts over" in outcome.err
    assert engine.asked == []

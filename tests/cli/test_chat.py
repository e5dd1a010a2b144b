from __future__ import annotations

from collections.abc import Callable

from tests.cli.conftest import FakeEngine, Outcome

Cli = Callable[..., Outcome]


def test_every_turn_sees_the_conversation(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("chat", "--system", "Be brief.", stdin="one\n\n two \n/reset\nthree\n/exit\nnever\n")
    assert outcome.out == "ONE\nTWO\nTHREE\n"
    system, one, two = (
        {"role": role, "content": text} for role, text in [("system", "Be brief."), ("user", "one"), ("user", "two")]
    )
    assert [request for request, _ in engine.asked] == [
        [system, one],
        [system, one, {"role": "assistant", "content": "ONE"}, two],
        [system, {"role": "user", "content": "three"}],
    ]


def test_unknown_commands_are_not_sent_to_the_model(cli: Cli, engine: FakeEngine) -> None:
    outcome = cli("chat", stdin="/rest\n")
    assert "no command /rest; /reset starts over" in outcome.err
    assert engine.asked == []

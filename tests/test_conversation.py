"""Conversations: every turn reads what is new of it, and answers as if all had been read."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.every_method import QUICK, make_model
from tests.serve.conftest import local
from vivace.conversation import Conversation
from vivace.engine import SHIPPED, Engine
from vivace.errors import CapacityError, ConfigError
from vivace.kernels.choice import choose
from vivace.methods.table import METHODS
from vivace.serve.config import ServeConfig

LINES = ("the quick brown fox", "aka bob", "and the fox?", "x")
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "do_sample": True, "temperature": 0.9, "seed": 8}
"""A seed that draws no special token: such a token is no text of the answer, and the turn is then read anew."""
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talks")


def opened(folder: Path, method: str, **how: Any) -> Engine:
    """A method's model on native kernels where there are some, with a template."""
    engine = vivace.load(make_model(folder, method), dtype="bfloat16", **how)
    engine.tokenizer.inner.chat_template = TEMPLATE
    return engine


@pytest.mark.slow_where(lambda method, settings: settings is SAMPLED and method not in QUICK)
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.lossless and name != "auto"])
def test_a_turn_reads_its_own_tokens(native: None, folder: Path, method: str, settings: dict[str, Any]) -> None:
    chat, again = (Conversation(opened(folder, method), system="Be brief.", method=method, **settings) for _ in "ab")
    again._prefix = None
    for line in LINES:
        before = chat.num_tokens
        result, wanted = chat.say(line), again.say(line)
        assert (result.token_ids, result.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert wanted.stats.num_cached_tokens == 0
        assert result.stats.num_cached_tokens == max(0, before - 1), "all but the last token, which is never stored"
    assert [message["role"] for message in chat.messages] == ["system", *("user", "assistant") * 4]
    chat.reset()
    assert chat.say(LINES[0]).stats.num_cached_tokens > 0, "what was said is found again"


def test_kernels_that_read_chunks_answer_the_same(folder: Path) -> None:
    engine = vivace.load(make_model(folder, "plain"), dtype="float32")
    engine.tokenizer.inner.chat_template = TEMPLATE
    chat, again = (Conversation(engine, method="plain", **GREEDY) for _ in "ab")
    again._prefix = None
    for line in LINES:
        assert chat.say(line * 9).token_ids == again.say(line * 9).token_ids


def test_a_conversation_that_is_too_long_stays_as_it_was(folder: Path) -> None:
    chat = Conversation(opened(folder, "plain"), method="plain", **GREEDY)
    first = chat.say("abc")
    with pytest.raises(CapacityError, match=r"the conversation has \d+ tokens .* nothing was cut or sent"):
        chat.say("long " * 2000)
    assert len(chat.messages) == 2
    assert chat.say("x").stats.num_cached_tokens >= first.stats.num_prompt_tokens or choose("auto").body is None


def test_what_a_conversation_cannot_be(folder: Path) -> None:
    engine = opened(folder, "plain")
    with pytest.raises(ConfigError, match="a conversation is written with the chat template; leave out raw"):
        Conversation(engine, raw=True)
    with pytest.raises(ConfigError, match="system must be a text, found 3"):
        Conversation(engine, system=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"adapter must be one name here, found \('a',\)"):
        Conversation(engine, adapter=["a"])
    chat = Conversation(engine, method="plain", **GREEDY)
    for message in (3, None, [1, 2], {"role": "user", "content": "x"}):
        with pytest.raises(ConfigError, match="a message must be a text, found"):
            chat.say(message)  # type: ignore[arg-type]
    assert (chat.messages, chat.num_tokens) == ([], 0)


def test_a_turn_that_nobody_waits_for_is_not_part_of_it(folder: Path) -> None:
    chat = Conversation(opened(folder, "plain"), method="plain", **GREEDY)
    chat.say("abc")
    stream = chat.stream("and?")
    next(stream)
    stream.close()
    assert len(chat.messages) == 2
    assert len(chat.say("x").token_ids) == 9


def test_what_conversations_keep_goes_when_memory_is_needed(native: None, folder: Path) -> None:
    free = opened(folder, "plain")
    weights = free.memory.held_bytes
    block = free.model.blocks.block_bytes
    engine = opened(folder, "plain", memory=weights + 5 * block)
    chats = [Conversation(engine, method="plain", **GREEDY) for _ in range(4)]
    wanted = [Conversation(free, method="plain", **GREEDY) for _ in range(4)]
    for number, line in enumerate(LINES):
        for chat, own in zip(chats, wanted, strict=True):
            assert chat.say(line * (1 + number)).token_ids == own.say(line * (1 + number)).token_ids
    assert sum(chat._prefix.num_evicted for chat in chats if chat._prefix) > 0
    assert engine.memory.taken_bytes <= 5 * block
    del chats, chat
    assert engine.memory.taken_bytes == 0


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="this installation carries no model")
@pytest.mark.parametrize("uses_cache", [True, False])
def test_four_turns_over_http(native: None, uses_cache: bool) -> None:
    """A client that sends the whole conversation each time: what the server has of it is not read again."""
    engine, alone = vivace.load(), vivace.load()
    config = ServeConfig(method="plain", prefix_cache_bytes=1 << 24 if uses_cache else 0)
    asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with local(engine, config) as server:
        messages: list[dict[str, str]] = []
        known: list[int] = []
        for line in ("name[Green Man], food[Indian]", "area[riverside]", "familyFriendly[yes]", "near[Clowns]"):
            messages.append({"role": "user", "content": line})
            reply = server.http().post("/v1/chat/completions", json={"messages": messages, **asked}).json()
            [choice], usage = reply["choices"], reply["usage"]
            [wanted] = alone.generate([messages], max_new_tokens=12, ignore_eos=True, method="plain", do_sample=False)
            assert tuple(choice["token_ids"]) == wanted.token_ids
            found = usage["prompt_tokens_details"]["cached_tokens"]
            prompt = list(reply["prompt_token_ids"])
            pairs = zip(known, prompt[:-1], strict=False)  # the answer's text may divide into other tokens
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            assert found == (shared if uses_cache else 0)
            known = [*prompt, *choice["token_ids"]][:-1]  # the last token is emitted, and never stored
            messages.append({"role": "assistant", "content": choice["message"]["content"]})

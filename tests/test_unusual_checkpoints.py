"""Checkpoints without tokenizer or template, with unknown keys, or with another vocabulary than their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.serve.conftest import local
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run
from vivace.cli.console import console
from vivace.errors import CapacityError, ConfigError, UnsupportedError, UsageError
from vivace.serve.config import ServeConfig

PROMPT = [5, 60, 17, 60, 17, 9]
TURN = 24
"""Length at which the rotary embedding of ``stretched`` changes."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def rewrite(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def bare(folder: Path) -> Path:
    """Weights and config.json alone."""
    for name in TOKENIZER:
        (folder / name).unlink(missing_ok=True)
    return folder


def refusal(kind: type[UsageError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_token_ids_are_a_prompt(folder: Path) -> None:
    engine = vivace.load(folder)
    text = engine.tokenizer.decode(PROMPT)
    assert engine.tokenizer.encode(text) == PROMPT
    [expected] = engine.generate(text, raw=True, max_new_tokens=9)
    [one] = engine.generate(PROMPT, max_new_tokens=9)
    both = engine.generate([PROMPT, PROMPT[::-1]], max_new_tokens=9)
    assert one.token_ids == expected.token_ids == both[0].token_ids
    assert one.text == expected.text
    assert engine.notes == []


def test_without_a_tokenizer_ids_go_in_and_come_out(bare: Path, folder: Path) -> None:
    engine = vivace.load(bare)
    [answer] = engine.generate(PROMPT, max_new_tokens=9, method="lookup")
    assert (len(answer.token_ids), answer.text) == (9, "")
    chunks = list(engine.stream(PROMPT, max_new_tokens=9))
    assert sum((chunk.token_ids for chunk in chunks), ()) == answer.token_ids
    assert engine.notes == ["this checkpoint has no tokenizer: token ids go in, and token ids come out"]
    for prompt in ("a text", [{"role": "user", "content": "hello"}]):
        assert "no tokenizer" in refusal(UnsupportedError, lambda prompt=prompt: engine.generate(prompt))
    stops = {"stop_strings": ["x"], "max_new_tokens": 9}
    assert "a text cannot end it" in refusal(UnsupportedError, lambda: engine.generate(PROMPT, **stops))


def test_without_a_tokenizer_nothing_can_be_drafted_by_another_model(bare: Path, tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path / "small", seed=1)
    message = refusal(UnsupportedError, lambda: vivace.load(bare, draft_model=small))
    assert "its tokens are not known" in message


def test_without_a_tokenizer_the_command_line_takes_ids(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [answer] = vivace.load(bare).generate(PROMPT, max_new_tokens=9)
    words = ["generate", "--model", str(bare), "--max-new-tokens", "9"]
    assert run([*words, "--token-ids", ",".join(map(str, PROMPT))]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == ",".join(map(str, answer.token_ids))
    assert "no tokenizer: token ids go in" in shown.err
    assert run([*words, "a text"]) == 2
    assert "this checkpoint has no tokenizer, so a text cannot be read" in capsys.readouterr().err
    assert run([*words, "--token-ids", "1,x"]) == 2
    assert "--token-ids has 'x'" in capsys.readouterr().err
    assert run([*words, "--token-ids", "1", "text"]) == 2
    assert "found both" in capsys.readouterr().err


def test_without_a_tokenizer_http_takes_ids(bare: Path) -> None:
    engine = vivace.load(bare)
    [answer] = engine.generate(PROMPT, max_new_tokens=9)
    body = {"model": "vivace", "prompt": PROMPT, "max_tokens": 9, "return_token_ids": True, "temperature": 0}
    with local(engine, ServeConfig(served_model_name="vivace")) as server:
        http = server.http()
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        assert (tuple(choice["token_ids"]), choice["text"]) == (answer.token_ids, "")
        chat = {"model": "vivace", "messages": [{"role": "user", "content": "hello"}]}
        for path, wrong in (("/v1/completions", body | {"prompt": "text"}), ("/v1/chat/completions", chat)):
            reply = http.post(path, json=wrong)
            assert reply.status_code == 400
            assert "no tokenizer" in reply.json()["error"]["message"]
        bound = http.post("/v1/completions", json=body | {"response_format": {"type": "json_object"}})
        assert bound.status_code == 400


def test_a_token_that_the_model_does_not_have_is_named(folder: Path) -> None:
    engine = vivace.load(folder)
    assert "token 2 of the prompt is 320;" in refusal(ConfigError, lambda: engine.generate([5, 320]))
    assert "token 1 of the prompt is -1;" in refusal(ConfigError, lambda: engine.generate([-1]))


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    engine = vivace.load(folder)
    engine.tokenizer.inner.add_tokens(["<image>"])
    [note] = engine.notes
    assert note.startswith("the tokenizer has 321 tokens and the model 320")
    message = refusal(ConfigError, lambda: engine.generate("what is <image>?", raw=True))
    assert "is 320 ('<image>'); this model has tokens 0 to 319" in message


def test_a_model_with_more_tokens_than_its_tokenizer(folder: Path) -> None:
    """Rows of padding, which are common: they have no text."""
    description = json.loads((folder / "tokenizer.json").read_text())
    description["model"]["merges"].pop()
    description["model"]["vocab"] = {k: v for k, v in description["model"]["vocab"].items() if v < 319}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    engine = vivace.load(folder)
    assert engine.notes == []
    assert engine.tokenizer.decode([5, 319]) == engine.tokenizer.decode([5])
    assert len(engine.generate([5, 319], max_new_tokens=3)[0].token_ids) == 3


def test_without_a_template_prompts_are_read_as_they_are(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    engine = vivace.load(folder)
    assert engine.notes == ["this checkpoint has no chat template: prompts are read as they are"]
    [told] = engine.generate("abc", max_new_tokens=5)
    assert told.token_ids == engine.generate("abc", max_new_tokens=5, raw=True)[0].token_ids
    messages = [{"role": "user", "content": "abc"}]
    assert "no chat template" in refusal(UnsupportedError, lambda: engine.generate(messages))


@pytest.mark.parametrize("needs", ["{{ tools | length }}", "{{ messages[0].content[0].image.path }}"])
def test_a_template_that_needs_tools_or_images(folder: Path, needs: str) -> None:
    (folder / "chat_template.jinja").write_text(needs)
    engine = vivace.load(folder)
    message = refusal(UnsupportedError, lambda: engine.generate("abc"))
    assert message.startswith("the chat template rejects these messages: ")
    assert len(engine.generate("abc", raw=True, max_new_tokens=3)[0].token_ids) == 3


def test_an_unknown_key_is_refused_with_the_way_around_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(folder, use_rope=False)
    assert "--ignore-config-key use_rope" in refusal(UnsupportedError, lambda: vivace.load(folder))
    words = ["generate", "abc", "--raw", "--max-new-tokens", "4", "--model", str(folder)]
    assert run(words) == 2
    assert "use_rope = False" in capsys.readouterr().err
    assert run([*words, "--ignore-config-key", "use_rope"]) == 0
    assert "config.json: use_rope = False is ignored, as you asked" in capsys.readouterr().err
    assert run([*words, "--ignore-config-key", "use_ropes"]) == 2
    assert "no key 'use_ropes' to ignore; did you mean 'use_rope'?" in capsys.readouterr().err


def test_ignoring_a_key_changes_nothing_else(folder: Path, tmp_path: Path) -> None:
    [expected] = vivace.load(folder).generate(PROMPT, max_new_tokens=9)
    rewrite(folder, use_rope=False)
    engine = vivace.load(folder, ignore_config_keys="use_rope", draft_model=make_checkpoint(tmp_path / "small", seed=1))
    assert engine.generate(PROMPT, max_new_tokens=9)[0].token_ids == expected.token_ids
    assert engine.generate(PROMPT, max_new_tokens=9, method="draft")[0].token_ids == expected.token_ids
    assert engine.notes == ["config.json: use_rope = False is ignored, as you asked"]


COPIES = {
    "convert": ["convert", "{out}", "--store"],
    "widen": ["widen", "{out}", "--factor", "2"],
    "upcycle": ["upcycle", "{out}", "--experts", "2", "--top-k", "1"],
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_written_without_the_ignored_key(folder: Path, tmp_path: Path, name: str) -> None:
    rewrite(folder, use_rope=False)
    out = tmp_path / "out"
    words = [word.format(out=out) for word in COPIES[name]] + ["--model", str(folder)]
    console.is_quiet = True
    assert run(words) == 2
    assert run([*words, "--ignore-config-key", "use_rope"]) == 0
    assert "use_rope" not in json.loads((out / "config.json").read_text())
    assert len(vivace.load(out).generate(PROMPT, max_new_tokens=4)[0].token_ids) == 4
    with pytest.raises(ConfigError, match="no key 'use_rope'"):
        vivace.load(out, ignore_config_keys=["use_rope"])


def test_a_model_and_adapters_say_what_they_are_without_the_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(folder, use_rope=False)
    assert run(["inspect", str(folder)]) == 2
    assert run(["inspect", str(folder), "--ignore-config-key", "use_rope", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2


@pytest.fixture
def stretched(folder: Path) -> vivace.Engine:
    """A model whose rotary embedding is another one in texts of more than ``TURN`` tokens."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 6.0, 20.0]}
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": TURN}
    rewrite(folder, rope_parameters={"rope_theta": 10000.0, **scaling}, max_position_embeddings=96)
    return vivace.load(folder, prefix_cache="1MiB")


def text(length: int) -> list[int]:
    return [1 + (7 * place) % 300 for place in range(length)]


def test_a_text_ends_where_its_rotation_would_change(stretched: vivace.Engine) -> None:
    [short] = stretched.generate(text(TURN - 4), ignore_eos=True)
    assert (len(short.token_ids), short.finish_reason) == (4, "length")
    message = refusal(CapacityError, lambda: stretched.generate(text(TURN - 4), max_new_tokens=5))
    assert f"texts of more than {TURN} tokens in another way" in message
    assert "ask for 4 new tokens at most" in message
    assert "ask for 0 new tokens" in refusal(CapacityError, lambda: stretched.generate(text(TURN)))
    [long] = stretched.generate(text(TURN + 1), max_new_tokens=20, ignore_eos=True)
    assert len(long.token_ids) == 20


def test_texts_on_both_sides_are_decoded_together(stretched: vivace.Engine) -> None:
    """Each is what it is alone, and what the model computes for the whole text at once."""
    prompts, settings = [text(12), text(TURN + 9)], {"max_new_tokens": 8, "ignore_eos": True}
    together = stretched.generate(prompts, method="lookup", **settings)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = stretched.generate(prompt, method="plain", **settings)
        assert alone.token_ids == answer.token_ids
        whole = stretched.logits([[*prompt, *answer.token_ids]])[0].argmax(-1)
        assert tuple(whole[len(prompt) - 1 : -1].tolist()) == answer.token_ids


def test_cached_prompts_of_both_sides_are_kept_apart(stretched: vivace.Engine) -> None:
    """A long prompt does not read entries that a short one with the same beginning stored."""
    cache = stretched.new_prefix_cache(1 << 20)
    stretched.prefix_cache = None
    fresh = [stretched.generate(text(n), max_new_tokens=4)[0].token_ids for n in (16, 40)]
    cache.chunk = 8
    stretched.prefix_cache = cache
    for _ in range(2):
        assert [stretched.generate(text(n), max_new_tokens=4)[0].token_ids for n in (16, 40)] == fresh


def test_what_is_stored_of_a_long_prompt_may_be_short(native: None, stretched: vivace.Engine, folder: Path) -> None:
    """All but the last token of a prompt is stored; where rows share any beginning, it is the prompt that counts."""
    engine = vivace.load(folder, dtype="bfloat16")
    lengths = (TURN + 1, TURN - 8, TURN + 1, 40, TURN - 8)
    fresh = [engine.generate(text(n), max_new_tokens=4)[0].token_ids for n in lengths]
    engine.prefix_cache = engine.new_prefix_cache(1 << 20)
    results = [engine.generate(text(n), max_new_tokens=4)[0] for n in lengths]
    assert [result.token_ids for result in results] == fresh
    assert [result.stats.num_cached_tokens for result in results] == [0, 0, TURN, TURN + 1, TURN - 9]

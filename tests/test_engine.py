"""What a user touches in Python: load, generate, stream, logits."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.decode.lookup import LookupState
from vivace.errors import CapacityError, ConfigError, MismatchError, NotFoundError, UsageError

PROMPTS = ["abc", "the quick brown fox", "x", "aaaa bbbb aaaa"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine"), context=128, layers=4)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> vivace.Engine:
    return vivace.load(checkpoint)


def test_results_come_in_order_and_do_not_depend_on_the_batch(engine: vivace.Engine) -> None:
    together = engine.generate(PROMPTS * 3, max_new_tokens=12, method="plain", batch_size=5, logprobs=True)
    for result, prompt in zip(together, PROMPTS * 3, strict=True):
        [alone] = engine.generate(prompt, max_new_tokens=12, method="plain", logprobs=True)
        assert (alone.token_ids, alone.text, alone.logprobs) == (result.token_ids, result.text, result.logprobs)
    assert engine.generate([]) == []


@pytest.mark.parametrize("method", ["lookup", "auto"])
def test_methods_agree_with_plain(engine: vivace.Engine, method: str) -> None:
    plain = engine.generate(PROMPTS, max_new_tokens=40, method="plain", logprobs=True)
    other = engine.generate(PROMPTS, max_new_tokens=40, method=method, logprobs=True)
    assert [r.token_ids for r in plain] == [r.token_ids for r in other]
    assert [r.logprobs for r in plain] == [r.logprobs for r in other]
    assert all((r.choice is not None) == (method == "auto") for r in other)


def test_streamed_text_is_the_text(engine: vivace.Engine) -> None:
    for prompt in PROMPTS:
        whole = engine.generate(prompt, max_new_tokens=30)[0]
        chunks = list(engine.stream(prompt, max_new_tokens=30))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
        assert [chunk.result is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1].result.text == whole.text


@pytest.mark.parametrize("wrong", [{"max_new_token": 3}, {"temperature": -1.0}, {"method": "multirate"}])
def test_a_stream_refuses_before_its_first_piece_is_asked_for(engine: vivace.Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(vivace.VivaceError):
        engine.stream(PROMPTS[0], **wrong)
    with pytest.raises(vivace.VivaceError):
        engine.stream("")


def test_a_stream_that_is_closed_leaves_nothing_behind(checkpoint: Path) -> None:
    def drafted(engine: vivace.Engine) -> int:
        settings = {"max_new_tokens": 24, "method": "lookup", "ignore_eos": True}
        return engine.generate("the quick fox the quick fox", **settings)[0].stats.num_draft_tokens

    engine = vivace.load(checkpoint)
    expected = drafted(engine)
    stream = engine.stream("fox quick the", max_new_tokens=40, method="lookup", ignore_eos=True)
    next(stream)
    next(stream)
    stream.close()
    gc.collect()
    assert not [kept for kept in gc.get_objects() if type(kept) is LookupState]
    assert drafted(engine) == expected


def test_a_stop_string_ends_the_text_before_it_and_never_flashes(engine: vivace.Engine) -> None:
    whole = engine.generate("abc", max_new_tokens=40, method="plain")[0]
    for first in range(1, len(whole.text) - 3, 3):
        stop = whole.text[first : first + 3]
        at = whole.text.find(stop)
        for method in ("plain", "lookup"):
            chunks = list(engine.stream("abc", max_new_tokens=40, method=method, stop_strings=stop))
            assert "".join(chunk.text for chunk in chunks) == whole.text[:at]
            assert chunks[-1].result.finish_reason == "stop"
            assert whole.token_ids[: len(chunks[-1].result.token_ids)] == chunks[-1].result.token_ids
            assert len(chunks[-1].result.token_ids) == chunks[-1].result.stats.num_tokens


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user", "text": "abc"}, "content must be a text or a list of text parts"),
        ({"role": "user"}, "content must be"),
        ({"role": "user", "content": None}, "content must be"),
        ({"role": "user", "content": 3}, "content must be"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content must be"),
        ({"role": "user", "content": ["abc"]}, "content must be"),
        ({"content": "abc"}, "needs a role"),
        ({"role": 3, "content": "abc"}, "needs a role"),
        ({"role": "", "content": "abc"}, "needs a role"),
    ],
    ids=str,
)
def test_messages_that_say_nothing(engine: vivace.Engine, message: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"message 2 .*{found}"):
        engine.generate([{"role": "user", "content": "abc"}, message], max_new_tokens=2)


def test_text_parts_of_a_message_are_one_text(engine: vivace.Engine) -> None:
    parts = [{"type": "text", "text": "the quick "}, {"type": "text", "text": "brown fox"}]
    whole, divided = (
        engine.request([{"role": "user", "content": content}], vivace.Options())
        for content in ("the quick brown fox", parts)
    )
    assert whole.tokens == divided.tokens
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    silent, empty = (
        engine.request(
            [{"role": "assistant", "content": content, "tool_calls": calls}, {"role": "user", "content": "a"}],
            vivace.Options(),
        )
        for content in (None, "")
    )
    assert silent.tokens == empty.tokens


def test_logits_are_those_of_every_position(engine: vivace.Engine) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    logits = engine.logits(ids)
    assert logits.shape == (2, 4, engine.model.config.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.equal(engine.logits(ids[1:])[0].argmax(-1), logits[1].argmax(-1))
    with pytest.raises(ConfigError, match=r"must be \(batch, length\), found \[4\]"):
        engine.logits(torch.tensor([1, 2, 3, 4]))


def test_asking_for_a_temperature_is_asking_to_sample(engine: vivace.Engine) -> None:
    def ids(**options: object) -> tuple[int, ...]:
        return engine.generate("abc", max_new_tokens=20, **options)[0].token_ids

    greedy = ids()
    assert ids(temperature=5.0, seed=1) != greedy
    assert ids(temperature=5.0, seed=1) == ids(temperature=5.0, seed=1, do_sample=True)
    assert ids(temperature=0) == greedy
    assert ids(top_k=1) == greedy
    with pytest.raises(ConfigError, match="temperature has no effect on greedy decoding"):
        ids(temperature=5.0, do_sample=False)


def test_the_checkpoints_own_settings_hold_until_overridden(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"max_new_tokens": 5, "do_sample": True, "temperature": 4.0, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    engine = vivace.load(tmp_path)
    sampled = engine.generate("abc", seed=3)[0]
    assert len(sampled.token_ids) <= 5
    assert sampled.token_ids != engine.generate("abc", seed=3, do_sample=False)[0].token_ids
    assert len(engine.generate("abc", max_new_tokens=9, ignore_eos=True)[0].token_ids) == 9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperatur": 1}, ConfigError, "no argument 'temperatur'; did you mean 'temperature'"),
        ({"temperature": -1.0}, ConfigError, "temperature must be >= 0, found -1.0"),
        ({"top_p": 0.0}, ConfigError, r"top_p must be in \(0, 1\], found 0.0"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens must be at least 1, found 0"),
        ({"max_new_tokens": 500}, CapacityError, "the context holds 128"),
        ({"stop_strings": ""}, ConfigError, "a stop string must not be empty"),
        ({"method": "mod"}, NotFoundError, "vivace train mod"),
        ({"method": "draft"}, NotFoundError, "--draft-model"),
    ],
)
def test_what_cannot_be_is_one_clear_error(engine: vivace.Engine, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        engine.generate("abc", **options)


BEAMS = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14, "length_penalty": 0.5}


def test_beams_return_scored_texts_the_best_first(engine: vivace.Engine) -> None:
    together = engine.generate(PROMPTS, batch_size=2, **BEAMS)
    for result, prompt in zip(together, PROMPTS, strict=True):
        found = [result, *result.alternatives]
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert len({one.token_ids for one in found}) == 3
        for one in found:
            assert one.text == engine.tokenizer.decode(one.token_ids)
        [alone] = engine.generate(prompt, **BEAMS)
        assert (alone.token_ids, alone.score, alone.alternatives) == (
            result.token_ids,
            result.score,
            result.alternatives,
        )
        chunks = list(engine.stream(prompt, **BEAMS))
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert chunks[-1].result.alternatives == result.alternatives
    greedy = engine.generate("abc", num_beams=1, num_return_sequences=1)[0]
    assert (greedy.score, greedy.alternatives) == (None, ())


def test_stop_strings_end_beams(engine: vivace.Engine) -> None:
    text = engine.generate("abc", **BEAMS)[0].text
    stopped = engine.generate("abc", **BEAMS, stop_strings=text[3:5])[0]
    for one in (stopped, *stopped.alternatives):
        assert text[3:5] not in one.text


def test_a_checkpoint_may_ask_for_beams(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"num_beams": 3, "length_penalty": 0.5, "max_new_tokens": 9, "min_length": 99, "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 0}))
    engine, usual = vivace.load(tmp_path), vivace.load(checkpoint)
    found = engine.generate("abc")[0]
    assert found.score == usual.generate("abc", **BEAMS | {"max_new_tokens": 9, "min_new_tokens": 9})[0].score
    assert engine.generate("abc", num_beams=1)[0].score is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 3, "do_sample": True, "eos_token_id": 0}))
    sampling = vivace.load(tmp_path)
    with pytest.raises(UsageError, match="beam search takes the likeliest texts and draws none"):
        sampling.generate("abc")
    assert sampling.generate("abc", num_beams=2)[0].score is not None, "beams that are asked for turn sampling off"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1, found 0"),
        ({"num_beams": 99}, "num_beams must be between 1 and 64, found 99"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences must be between 1 and num_beams, 2, found 3",
        ),
        ({"length_penalty": 2.0}, "length_penalty has no effect without beams; give num_beams"),
        ({"early_stopping": True}, "early_stopping has no effect without beams"),
        ({"num_return_sequences": 2}, "num_return_sequences has no effect without beams"),
        ({"num_beams": 2, "temperature": 0.7}, "beam search takes the likeliest texts and draws none"),
        ({"num_beams": 2, "do_sample": True}, "beam search takes the likeliest texts and draws none"),
        ({"num_beams": 2, "method": "lookup"}, "method lookup drafts for one text, and num_beams is 2"),
        ({"num_beams": 2, "logprobs": True}, "logprobs of single tokens are not kept with beams"),
        ({"num_beams": 2, "min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, more than the 8 tokens"),
        ({"num_beam_groups": 2}, "no argument 'num_beam_groups'"),
    ],
    ids=str,
)
def test_beams_that_cannot_be(engine: vivace.Engine, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate("abc", **options)


def test_prompts_that_cannot_be(engine: vivace.Engine) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        engine.generate("")
    with pytest.raises(CapacityError, match=r"the prompt has \d+ tokens; the context of this model holds 128"):
        engine.generate("zq" * 300)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), 6, torch.tensor(7)],
        (5, 6, 7),
        range(5, 8),
        [torch.tensor([5, 6, 7])],
        torch.tensor([[5, 6, 7]]),
    ],
    ids=str,
)
def test_what_tokenizers_return_is_a_prompt(engine: vivace.Engine, prompt: Any) -> None:
    expected = engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids
    assert [result.token_ids for result in engine.generate(prompt, max_new_tokens=4)] == [expected]


def test_prompts_may_be_in_arrays(engine: vivace.Engine) -> None:
    def texts(prompts: Any) -> list[str]:
        return [result.text for result in engine.generate(prompts, max_new_tokens=4)]

    assert texts(np.array(PROMPTS)) == texts(tuple(PROMPTS)) == texts(PROMPTS)
    assert texts(torch.tensor([[5, 6], [7, 8]])) == texts([[5, 6], np.array([7, 8])]) == texts([[5, 6], [7, 8]])
    chunks = list(engine.stream(np.array([5, 6]), max_new_tokens=4))
    assert "".join(chunk.text for chunk in chunks) == texts([5, 6])[0]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (None, "None"),
        (5, "5"),
        (b"abc", "b'abc'"),
        ({"role": "user", "content": "x"}, "{'content': 'x', 'role': 'user'}"),
        ({"abc"}, "{'abc'}"),
        (torch.tensor(5), "5"),
        ([1.5, 2], "[1.5, 2]"),
        ([1, 2.5], "[1, 2.5]"),
        ([True, False], "[True, False]"),
        (torch.tensor([0.5, 1.0]), "[0.5, 1.0]"),
        ([None], "[None]"),
        ([b"abc"], "[b'abc']"),
        (["abc", None], "None"),
        (["abc", 5], "5"),
        ([[5], [1.5]], "[1.5]"),
        ([[5], ["abc"]], "['abc']"),
        ([{"role": "user", "content": "x"}, "abc"], "[{'content': 'x', 'role': 'user'}, 'abc']"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_one_line(engine: vivace.Engine, prompt: Any, found: str) -> None:
    message = f"a prompt must be a text, a list of messages or a list of token ids, found {found}"
    with pytest.raises(ConfigError) as caught:
        engine.generate(prompt)
    assert str(caught.value) == message
    with pytest.raises(ConfigError, match="a prompt must be a text, a list of messages or a list of token ids"):
        list(engine.stream(prompt))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[]], ConfigError, "token_ids has no tokens: its shape is [1, 0]"),
        ([], ConfigError, "token_ids must be (batch, length), found [0]"),
        ([[1, 2], [3]], ConfigError, "token_ids must be texts of one length, as integers, found [[1, 2], [3]]"),
        ([["a"]], ConfigError, "token_ids must be texts of one length, as integers, found [['a']]"),
        ([[1.5]], ConfigError, "token_ids must be texts of one length, as integers, found [[1.5]]"),
        ([[True]], ConfigError, "token_ids must be texts of one length, as integers, found [[True]]"),
        ([[2**70]], ConfigError, f"token_ids must be texts of one length, as integers, found [[{2**70}]]"),
        ("abc", ConfigError, "token_ids must be texts of one length, as integers, found 'abc'"),
        (None, ConfigError, "token_ids must be texts of one length, as integers, found None"),
        ([[1, 2], [3, 2**40]], ConfigError, f"token 2 of the prompt is {2**40}; this model has tokens 0 to 319"),
        ([[1, -1]], ConfigError, "token 2 of the prompt is -1; this model has tokens 0 to 319"),
        ([[3] * 129], CapacityError, "the text has 129 tokens; the context of this model holds 128"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_logits_of_what_is_no_text(engine: vivace.Engine, ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        engine.logits(ids)
    assert str(caught.value) == message


@pytest.mark.parametrize("adapter", [3, ["a"], [None]])
def test_logits_wear_one_adapter_by_its_name(engine: vivace.Engine, adapter: Any) -> None:
    with pytest.raises(ConfigError, match="adapter must be "):
        engine.logits([[1, 2]], adapter=adapter)


def test_logits_of_ids_of_any_library(engine: vivace.Engine) -> None:
    expected = engine.logits([[5, 6]])
    for ids in (
        np.array([[5, 6]], dtype=np.uint64),
        np.array([[5.0, 6.0]]),
        [np.array([5, 6])],
        torch.tensor([[5, 6]]),
    ):
        assert torch.equal(engine.logits(ids), expected)
    assert engine.logits([[3] * 128]).shape[1] == 128


def test_an_id_beyond_32_bits_is_foreign(engine: vivace.Engine) -> None:
    with pytest.raises(ConfigError, match=f"token 2 of the prompt is {2**40}; this model has tokens 0 to 319"):
        engine.generate([5, 2**40])


def test_a_text_with_half_a_surrogate_pair_is_refused(engine: vivace.Engine) -> None:
    with pytest.raises(ConfigError, match=r"the text is not valid Unicode: there is '\\ud800' after '<\|user\|>a'"):
        engine.generate("a\ud800b")
    assert engine.generate("a\U0001d11eb", max_new_tokens=2)


def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        vivace.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="kernels"):
        vivace.load(tmp_path, kernels="cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "path must be a path, found 3"),
        ({"path": b"here"}, "path must be a path, found b'here'"),
        ({"draft_model": ["a"]}, r"draft_model must be a path, found \['a'\]"),
        ({"prompt_cache": 3}, "prompt_cache must be a path, found 3"),
        ({"guard": {}}, "guard must be a path, found {}"),
        ({"prompt_pool": True}, "prompt_pool must be a path, found True"),
        ({"recovery": "no"}, "recovery must be True or False, found 'no'"),
        ({"remember": "no"}, "remember must be True or False, found 'no'"),
        ({"prompt_cache_ro": [True]}, r"prompt_cache_ro must be True or False, found \[True\]"),
        ({"screened_head": "no"}, "screened_head must be True or False, found 'no'"),
        ({"ignore_config_keys": None}, "ignore_config_keys must be a text or a list of texts, found None"),
        ({"ignore_config_keys": [3]}, r"ignore_config_keys must be a text or a list of texts, found \[3\]"),
        ({"kernels": None}, "kernels must be .*found None; choose from"),
        ({"weights": None}, "weights must be .*found None; choose from"),
        ({"kv": None}, "kv is None; choose from int8, same"),
        ({"attention": 3}, "attention is 3; choose from auto, el, shared"),
        ({"dtype": None}, "weights cannot be None; use auto, float32 or bfloat16"),
    ],
)
def test_arguments_of_another_kind_are_one_line(checkpoint: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vivace.load(**({"path": checkpoint} | arguments))


def test_truth_values_of_any_library_open_a_model(checkpoint: Path) -> None:
    assert vivace.load(str(checkpoint), recovery=np.False_, remember=0, prompt_cache_ro=None, screened_head=None)  # type: ignore[arg-type]


def test_a_draft_model_in_the_checkpoint_is_used_by_its_method_alone(tmp_path: Path) -> None:
    """It is read when it is first asked for, and ``auto`` does not ask."""
    folder = make_checkpoint(tmp_path / "model", context=128, layers=4)
    make_checkpoint(folder / "draft", context=128, layers=1)
    engine = vivace.load(folder)
    assert "draft" in engine.methods.ready()
    assert engine.methods.second is not None
    assert "decoder" not in vars(engine.methods.second)
    plain, auto = (engine.generate(PROMPTS, max_new_tokens=20, method=method) for method in ("plain", "auto"))
    assert "decoder" not in vars(engine.methods.second)
    drafted = engine.generate(PROMPTS, max_new_tokens=20, method="draft")
    assert engine.methods.second.decoder.config.num_layers == 1
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted] == [r.token_ids for r in auto]
    assert sum(r.stats.num_draft_tokens for r in drafted) > 0
    named = vivace.load(folder, draft_model=make_checkpoint(tmp_path / "other", context=128, layers=2))
    assert named.methods.second is not None
    assert named.methods.second.decoder.config.num_layers == 2, "what was named goes before"


def test_a_draft_model_of_other_tokens_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", context=128, layers=2)
    tokens = make_checkpoint(folder / "draft", context=128, layers=1) / "tokenizer.json"
    written = json.loads(tokens.read_text())
    pieces = written["model"]["vocab"]
    first, second = list(pieces)[40:42]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    tokens.write_text(json.dumps(written))
    engine = vivace.load(folder)
    assert engine.generate("abc", max_new_tokens=4, method="plain")[0].token_ids
    with pytest.raises(MismatchError, match="the tokenizers differ in 2 of"):
        engine.generate("abc", max_new_tokens=4, method="draft")

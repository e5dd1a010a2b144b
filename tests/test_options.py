"""Every field of ``Options`` changes something or is refused: nothing asked for is dropped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.engine import Options
from vivace.errors import ConfigError
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig
from vivace.options import KINDS

PROMPTS = ["abc abc abc abc", "the quick brown fox the quick brown fox"]
PLAIN = {"method": "plain", "max_new_tokens": 24}
DRAWN = PLAIN | {"do_sample": True, "temperature": 2.0}
SEARCHED = {"num_beams": 4, "max_new_tokens": 24}
LOOKED_UP = PLAIN | {"method": "lookup"}

CHANGES: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "max_new_tokens": (PLAIN, 2),
    "min_new_tokens": (PLAIN, 20),
    "do_sample": (PLAIN, True),
    "temperature": (PLAIN, 5.0),
    "top_p": (DRAWN, 0.05),
    "top_k": (DRAWN, 1),
    "min_p": (DRAWN, 1.0),
    "repetition_penalty": (PLAIN, 9.0),
    "no_repeat_ngram_size": (PLAIN | {"ignore_eos": True}, 1),
    "num_beams": (PLAIN, 4),
    "length_penalty": (SEARCHED, -2.0),
    "early_stopping": (SEARCHED | {"length_penalty": 3.0}, True),
    "num_return_sequences": (SEARCHED, 2),
    "stop_strings": (PLAIN | {"ignore_eos": True}, [" ", "e", "a", "o", "n"]),
    "ignore_eos": (PLAIN, True),
    "seed": (DRAWN, 7),
    "method": (PLAIN, "lookup"),
    "raw": (PLAIN, True),
    "logprobs": (PLAIN, True),
    "batch_size": (PLAIN, 1),
    "exact": (PLAIN, True),
    "num_draft_tokens": (LOOKED_UP | {"ignore_eos": True}, 1),
    "quality": (PLAIN | {"method": "dynamic", "ignore_eos": True}, 0.9),
    "prefill": (PLAIN | {"prefill": "lexical", "min_prompt": 2}, "random"),
    "keep": (PLAIN | {"prefill": "random", "min_prompt": 2}, "0:0.2"),
    "min_prompt": (PLAIN | {"prefill": "random"}, 2),
    "decode_keep": (PLAIN | {"prefill": "lazy", "min_prompt": 2, "keep": "1:0.3"}, 0.3),
    "progress": (PLAIN, "recorded"),
}
"""Field -> what it is added to, and its value."""

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "batch_size must be at least 1, found 0": {"batch_size": 0},
    "min_new_tokens must be at least 0, found -1": {"min_new_tokens": -1},
    "min_new_tokens is 30, more than the 24 tokens at most": {"min_new_tokens": 30},
    "num_draft_tokens is 3, but method plain drafts nothing": {"num_draft_tokens": 3},
    "num_draft_tokens is 3, but method auto finds out": {"num_draft_tokens": 3, "method": "auto"},
    "num_draft_tokens is 64; a draft has 1 to 63 guesses": {"num_draft_tokens": 64, "method": "lookup"},
    "quality is 0.9, but method plain does not leave early": {"quality": 0.9},
    "quality is 0.7; the thresholds of this adapter are for 0.9, 0.98": {"quality": 0.7, "method": "dynamic"},
    "quality is 1000": {"quality": 10**400, "method": "dynamic"},
    "num_draft_tokens is 3, but method dynamic drafts nothing": {"num_draft_tokens": 3, "method": "dynamic"},
    "num_draft_tokens is 0; a draft has 1 to 63 guesses": {"num_draft_tokens": 0, "method": "lookup"},
    "forced_bos_token_id is for encoder-decoder models": {"forced_bos_token_id": 3},
    "no effect on greedy decoding": {"top_k": 3, "do_sample": False},
}

MISTYPED: Sequence[tuple[str, Any, str]] = (
    ("max_new_tokens", 4.5, "max_new_tokens must be an integer, found 4.5"),
    ("max_new_tokens", "4", "max_new_tokens must be an integer, found '4'"),
    ("max_new_tokens", True, "max_new_tokens must be an integer, found True"),
    ("max_new_tokens", float("inf"), "max_new_tokens must be an integer, found inf"),
    ("top_k", 2.5, "top_k must be an integer, found 2.5"),
    ("batch_size", None, "batch_size must be an integer, found None"),
    ("num_beams", np.ones((2, 1)), "num_beams must be an integer, found array([[1.], [1.]])"),
    ("seed", "a", "seed must be an integer, found 'a'"),
    ("seed", None, "seed must be an integer, found None"),
    ("seed", 2**64, f"seed must be at least -2**63 and below 2**64, found {2**64}"),
    ("seed", -(2**63) - 1, f"seed must be at least -2**63 and below 2**64, found {-(2**63) - 1}"),
    ("temperature", "1", "temperature must be a number, found '1'"),
    ("temperature", True, "temperature must be a number, found True"),
    ("length_penalty", [1.0], "length_penalty must be a number, found [1.0]"),
    ("do_sample", "no", "do_sample must be True or False, found 'no'"),
    ("logprobs", 5, "logprobs must be True or False, found 5"),
    ("method", None, "method must be a text, found None"),
    ("keep", 0.5, "keep must be a text, found 0.5"),
    ("stop_strings", [3], "stop_strings must be a text or a list of texts, found [3]"),
    ("stop_strings", 3, "stop_strings must be a text or a list of texts, found 3"),
    ("stop_strings", b"ab", "stop_strings must be a text or a list of texts, found b'ab'"),
    ("stop_strings", [None], "stop_strings must be a text or a list of texts, found [None]"),
    ("adapter", 3, "adapter must be a name or a list of names, found 3"),
    ("forced_bos_token_id", 2.5, "forced_bos_token_id must be an integer or a text, found 2.5"),
    ("decode_keep", [1], "decode_keep must be a number or a text, found [1]"),
    ("early_stopping", 0.5, "early_stopping must be True, False or 'never', found 0.5"),
    ("progress", 3, "progress must be a function, found 3"),
)

USUAL: Sequence[tuple[str, Any, Any]] = (
    ("max_new_tokens", np.int64(4), 4),
    ("max_new_tokens", torch.tensor(4), 4),
    ("max_new_tokens", 4.0, 4),
    ("seed", np.uint64(2**63), 2**63),
    ("seed", -(2**63), -(2**63)),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", torch.tensor(0.5), 0.5),
    ("temperature", 2, 2),
    ("do_sample", np.True_, True),
    ("ignore_eos", 1, True),
    ("raw", None, False),
    ("do_sample", None, None),
    ("stop_strings", ["a", "b"], ("a", "b")),
    ("stop_strings", {"a"}, ("a",)),
    ("stop_strings", np.array(["a"]), ("a",)),
    ("adapter", ["a", None], ("a", None)),
    ("early_stopping", 0, False),
    ("forced_bos_token_id", "fra_Latn", "fra_Latn"),
    ("decode_keep", "same", "same"),
)
"""Field, what is given, and what it is kept as."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> vivace.Engine:
    """A model whose greedy text ends early: one of its tokens is made an end token."""
    folder = make_checkpoint(tmp_path_factory.mktemp("options"))
    usual = vivace.load(folder, kernels="torch").generate(PROMPTS[0], **PLAIN)[0]
    settings = {"eos_token_id": [usual.token_ids[4]]}
    save_exits(folder, vivace.load(folder, kernels="torch").model)
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return vivace.load(folder, kernels="torch")


def save_exits(folder: Path, model: Decoder) -> None:
    """Gates that nothing passes at the usual quality, and everything at a lower one."""
    config = DynamicConfig(GatesConfig((GateConfig(1),), rank=2, bottleneck=4), RouterConfig(latent=4))
    plan = ExitPlan((ExitThresholds(0.9, (-1.0,)), ExitThresholds(0.98, (None,))))
    tensors = {name: value.to(model.dtype) for name, value in DynamicWeights(config, model.config).tensors().items()}
    place = folder / "adapters" / "dynamic"
    save_adapter(place, "dynamic", base_hash(folder), dataclasses.asdict(plan), dataclasses.asdict(config), tensors)


class Observed:
    """What can be seen of a call: its answers, the rows that went up and the progress it reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.reports: list[tuple[int, int]] = []
        forward = Layer.forward

        def recorded(layer: Layer, h: torch.Tensor, step: Step) -> torch.Tensor:
            self.rows.append(len(h))
            return forward(layer, h, step)

        monkeypatch.setattr(Layer, "forward", recorded)

    def of(self, engine: vivace.Engine, options: Mapping[str, Any]) -> object:
        self.rows.clear()
        self.reports.clear()
        if "progress" in options:
            options = {**options, "progress": lambda done, total: self.reports.append((done, total))}
        results = engine.generate(PROMPTS, **options)
        answers = [
            (r.text, r.token_ids, r.logprobs, r.finish_reason, r.method, r.alternatives, r.stats.num_prompt_tokens)
            for r in results
        ]
        return answers, tuple(self.rows), tuple(self.reports)


def test_the_table_has_every_field() -> None:
    elsewhere = {"forced_bos_token_id", "adapter", "soft_prompt"}  # tests/test_encoder_decoders.py, tests/adapters
    assert set(CHANGES) | elsewhere == {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_changes_something(engine: vivace.Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base, value = CHANGES[name]
    observed = Observed(monkeypatch)
    usual = observed.of(engine, base)
    assert observed.of(engine, base) == usual
    assert observed.of(engine, {**base, name: value}) != usual


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_have_no_effect_is_refused(engine: vivace.Engine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(PROMPTS, **PLAIN | REFUSED[message])


def test_messages_cannot_be_raw(engine: vivace.Engine) -> None:
    messages = [{"role": "user", "content": "abc"}]
    assert engine.generate(messages, **PLAIN)[0].token_ids == engine.generate("abc", **PLAIN)[0].token_ids
    with pytest.raises(ConfigError, match="give a text to be taken as it is"):
        engine.generate(messages, **PLAIN, raw=True)


def test_nobody_says_how_long(engine: vivace.Engine, tmp_path: Path) -> None:
    """The default is not the whole context, whose cache may be larger than the machine."""
    settings = {"method": "plain", "ignore_eos": True}
    room = engine.model.config.max_positions - len(engine.tokenizer.encode_prompt("abc"))
    assert len(engine.generate("abc", **settings)[0].token_ids) == room < 256
    folder = make_checkpoint(tmp_path, context=512)
    assert len(vivace.load(folder).generate("abc", **settings)[0].token_ids) == 256


def test_every_field_has_a_kind() -> None:
    named = [name for _, _, names in KINDS for name in names]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Options))


@pytest.mark.parametrize(("name", "value", "message"), MISTYPED, ids=lambda each: str(each)[:40])
def test_a_field_of_another_kind_is_one_line(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.of({name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "value", "kept"), USUAL, ids=lambda each: str(each)[:40])
def test_numbers_of_other_libraries_and_whole_ones_are_taken(name: str, value: Any, kept: Any) -> None:
    found = getattr(Options.of({name: value}), name)
    assert (found, type(found)) == (kept, type(kept))


def test_a_seed_may_be_any_that_a_generator_takes(engine: vivace.Engine) -> None:
    for seed in (-(2**63), 2**64 - 1, np.int64(7)):
        assert engine.generate("abc", **DRAWN | {"max_new_tokens": 2, "seed": seed})

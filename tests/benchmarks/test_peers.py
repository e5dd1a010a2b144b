"""The random models of the speed tables: every contestant can run them, and a prompt is the tokens it was drawn as."""

from __future__ import annotations

from pathlib import Path

import torch

import vivace
from benchmarks.peers import PROMPT_WORDS, SHAPES, make_random, random_texts
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.peers import peer_systems
from vivace.evaluate.systems import MethodSystem

TINY = {
    **{"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}


def test_random_models_take_part(tmp_path: Path) -> None:
    engine = vivace.load(make_random(tmp_path / "tiny", TINY))
    texts = random_texts(engine.folder, 3)
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in texts]
    assert [len(question.token_ids) for question in questions] == [PROMPT_WORDS] * 3
    assert all(min(question.token_ids) >= 256 for question in questions)
    assert len(set(questions[0].token_ids)) > PROMPT_WORDS // 2
    assert engine.tokenizer.eos_ids == ()
    (peer,), _ = peer_systems(
        ["transformers"], engine.folder, questions, max_new_tokens=9, device=torch.device("cpu")
    )  # fmt: skip
    for system in (MethodSystem("plain", engine, 9), peer):
        assert [len(ids) for question in questions for ids in system.answer([question]).token_ids] == [9] * 3


def test_the_models_have_the_size_of_their_names() -> None:
    for name, shape in SHAPES.items():
        config = ModelConfig(
            vocab_size=shape["vocab_size"],
            width=shape["hidden_size"],
            num_layers=shape["num_hidden_layers"],
            num_heads=shape["num_attention_heads"],
            num_kv_heads=shape["num_key_value_heads"],
            head_dim=64,
            ffn_width=shape["intermediate_size"],
            max_positions=1024,
        )
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in Decoder(config).parameters())
        assert abs(count - float(name.removesuffix("M")) * 1e6) < 2e6, name

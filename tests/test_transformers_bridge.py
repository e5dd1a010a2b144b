"""``model.generate(custom_generate=vivace.custom_generate)``: transformers' answers over transformers' storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vivace
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.share import share_module
from vivace.errors import MismatchError, UnsupportedError

END = 7
SETTINGS = [
    {},
    {"repetition_penalty": 1.6, "no_repeat_ngram_size": 3},
    {"min_new_tokens": 5, "eos_token_id": END},
    {"suppress_tokens": [3, 4, 5]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.25))
    return made


@pytest.fixture
def ragged() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("method", ["plain", "lookup", "auto"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_is_what_generate_gives(model, ragged, method: str, settings: dict[str, Any]) -> None:
    usual = model.generate(**ragged, max_new_tokens=24, do_sample=False, **settings)
    ours = model.generate(
        **ragged, max_new_tokens=24, do_sample=False, custom_generate=vivace.custom_generate, method=method, **settings
    )
    assert torch.equal(ours, usual)


def test_the_weights_are_the_modules_own(model) -> None:
    shared = share_module(model)
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in shared.parameters()} <= theirs


def test_a_change_of_the_weights_is_seen(model, ragged) -> None:
    call = {**ragged, "max_new_tokens": 8, "do_sample": False, "custom_generate": vivace.custom_generate}
    before = model.generate(**call)
    kept = model.model.embed_tokens.weight.data.clone()
    model.model.embed_tokens.weight.data.copy_(kept.flip(0))
    after, usual = model.generate(**call), model.generate(**ragged, max_new_tokens=8, do_sample=False)
    model.model.embed_tokens.weight.data.copy_(kept)
    assert torch.equal(after, usual)
    assert not torch.equal(before, after)


def test_sampling_follows_torch_seed_and_the_processors(model, ragged) -> None:
    def drawn(seed: int, **settings: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(
            **ragged, max_new_tokens=12, do_sample=True, custom_generate=vivace.custom_generate, **settings
        )

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    usual = model.generate(**ragged, max_new_tokens=12, do_sample=False)
    assert torch.equal(drawn(3, top_k=1), usual)


def test_a_dictionary_carries_statistics(model, ragged) -> None:
    found = model.generate(
        **ragged,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=vivace.custom_generate,
        method="lookup",
    )
    assert found.sequences.shape == (3, 15)
    assert [row.num_tokens for row in found.speculation] == [6, 6, 6]


@pytest.mark.parametrize("asked", [{"output_scores": True}, {"num_beams": 2}, {"output_attentions": True}], ids=str)
def test_what_we_do_not_do_is_refused(model, ragged, asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(asked))):
        model.generate(
            **ragged,
            max_new_tokens=4,
            return_dict_in_generate=True,
            custom_generate=vivace.custom_generate,
            **asked,
        )


def test_an_adapter_is_used_by_whichever_method_needs_it_or_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 6, "do_sample": False, "custom_generate": vivace.custom_generate}
    usual = model.generate(ids, **settings, method="plain")
    for method in ("auto", "multirate", "multirate+lookup"):
        assert torch.equal(model.generate(ids, **settings, method=method, adapter=adapter), usual)
    other = make_adapter(tmp_path / "other", make_checkpoint(tmp_path / "foreign", seed=1))
    with pytest.raises(MismatchError, match="was trained on base"):
        model.generate(ids, **settings, method="auto", adapter=other)

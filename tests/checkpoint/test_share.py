"""A decoder over a transformers module: the module's own memory, the module's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from tests.parity.families import CONFIGS, VOCAB, make
from vivace.checkpoint.share import share_module
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import MismatchError, UnsupportedError


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_same_storage_same_logits(family: str) -> None:
    module = make(family)
    decoder = share_module(module)
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    ours = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    assert ours == theirs
    tokens = torch.randint(1, VOCAB, (2, 50))
    step = replace(Step.dense(2, 50), extent=torch.full((100,), 50))
    with torch.inference_mode():
        got = decoder.head(decoder.run(decoder.embed(tokens.view(-1), step), step))
        torch.testing.assert_close(got.view(2, 50, -1), module(tokens).logits, atol=1e-4, rtol=0)


def test_a_change_of_the_module_is_seen() -> None:
    module = make("llama")
    decoder = share_module(module)
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.fill_(0.5)
    assert (decoder.layers[0].qkv.parts[1].weight == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_rows_keep_their_bits(family: str, dtype: torch.dtype) -> None:
    """Also over split and transposed projections."""
    decoder = share_module(make(family).to(dtype))
    with torch.inference_mode():
        tokens = torch.randint(1, VOCAB, (13,)).tolist()
        draft = Draft.committed_only({slot: [token] for slot, token in enumerate(tokens)})
        step = Step.of(draft, decoder.new_cache(13, 8))
        together = decoder.run(decoder.embed(draft.tokens, step), step)
        for row, token in enumerate(tokens):
            step = Step.of(Draft.committed_only({0: [token]}), decoder.new_cache(1, 8))
            assert torch.equal(decoder.run(decoder.embed(torch.tensor([token]), step), step)[0], together[row])


def test_modules_that_cannot_be_shared() -> None:
    other = transformers.GPTNeoXConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=9)
    with pytest.raises(UnsupportedError, match="'gpt_neox' is not supported"):
        share_module(transformers.AutoModelForCausalLM.from_config(other))
    module = make("llama")
    del module.lm_head
    with pytest.raises(MismatchError, match=r"no parameter lm_head\.weight"):
        share_module(module)

"""Checkpoints open with the configurations that their publishers ship, and compute what transformers computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.parity.families import randomise
from tests.published_checkpoints import VOCAB, Published, published, shrunk
from vivace.checkpoint.families import FAMILIES, translate
from vivace.checkpoint.load import load_decoder
from vivace.core.step import Step
from vivace.errors import UnsupportedError

REFUSED = {"facebook/opt-350m": "do_layer_norm_before = False"}
"""Published checkpoints that do not open, and what the message names."""
OPEN = [one for one in published() if one.name not in REFUSED]


def theirs(config: dict[str, object]) -> nn.Module:
    """A random model of transformers with this configuration."""
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
    randomise(model, 0, embedding=0.05)
    return model.eval()


def ours(folder: Path, tokens: Tensor) -> Tensor:
    decoder = load_decoder(folder, "float32")
    step = Step.dense(1, len(tokens))
    return decoder.head(decoder.run(decoder.embed(tokens, step), step))


@pytest.mark.parametrize("one", OPEN, ids=lambda one: one.name)
def test_a_published_configuration_computes_the_same(one: Published, tmp_path: Path) -> None:
    """transformers reads the same keys, and its logits are ours."""
    config = shrunk(one.config)
    assert config.keys() == one.config.keys()
    model = theirs(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(1, 41)
    with torch.inference_mode():
        expected = model(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(ours(tmp_path, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std(0).mean() > 0.01, "logits that are all alike prove little"


@pytest.mark.parametrize("one", OPEN, ids=lambda one: one.name)
def test_a_published_configuration_is_read_at_full_size(one: Published) -> None:
    config = translate(one.config)
    inner = one.config.get("text_config", one.config)
    assert config.vocab_size == inner["vocab_size"]
    assert config.num_layers == inner.get("num_hidden_layers", inner.get("n_layer"))


@pytest.mark.parametrize(("name", "named"), REFUSED.items())
def test_a_refused_configuration_is_named(name: str, named: str) -> None:
    one = next(one for one in published() if one.name == name)
    with pytest.raises(UnsupportedError, match=named):
        translate(one.config)


def test_there_are_forty_and_two_of_every_family() -> None:
    assert len(OPEN) >= 40
    families = [one.family for one in OPEN]
    decoders = {name: family for name, family in FAMILIES.items() if family.names.encoder is None}
    assert {family for family in decoders if families.count(family) < 2} == set()
    assert len({one.name for one in published()}) == len(published())
    assert {family.example for family in decoders.values()} <= {one.name for one in OPEN}
    assert all(re.match(r"github\.com/\S+/\S+ .+ @ [0-9a-f]{12}", one.source) for one in published())


def test_sizes_are_all_that_changes() -> None:
    """Every key keeps its value, but for sizes, token ids and lists that are as long as a size."""
    sizes = re.compile(
        r"(hidden|intermediate|vocab)_size|num_.*|n_(embd|head|layer)|head_dim|ffn_dim|.*_token_i.*|layer_.*"
    )
    for one in published():
        small = shrunk(one.config)
        changed = {key for key, value in one.config.items() if small[key] != value}
        left = {key for key in changed if not sizes.fullmatch(key)} - {"moe_intermediate_size", "word_embed_proj_dim"}
        assert left <= {"rope_scaling", "text_config", "vision_config"}, one.name
        assert small.get("vocab_size", VOCAB) == VOCAB

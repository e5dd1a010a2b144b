"""``model.generate(custom_generate=vivace.custom_generate)``: transformers' answers over transformers' storage."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import vivace
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace import transformers_bridge
from vivace.checkpoint.share import share_module
from vivace.core.footprint import held_bytes
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.kernels.choice import KernelChoice

END = 7
SETTINGS = [
    {},
    {"repetition_penalty": 1.6, "no_repeat_ngram_size": 3},
    {"min_new_tokens": 5, "eos_token_id": END},
    {"suppress_tokens": [3, 4, 5]},
]


def make_module(*, is_tied: bool = False) -> Any:
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
        tie_word_embeddings=is_tied,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.25))
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return make_module()


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


@pytest.fixture
def packed(model, library) -> Any:
    """Return a copy of the module that native kernels run."""
    return copy.deepcopy(model).to(torch.bfloat16)


def decode(model: Any, **settings: Any) -> torch.Tensor:
    ids = torch.randint(1, 61, (1, 7), generator=torch.Generator().manual_seed(2))
    call = {"max_new_tokens": 16, "do_sample": False, "method": "plain", **settings}
    return model.generate(ids, custom_generate=vivace.custom_generate, **call)[0]


def merge(weight: torch.Tensor) -> None:
    """Change a weight as peft merges LoRA weights: PyTorch does not count it."""
    weight.data += 0.5


CHANGES: dict[str, Callable[[Any], object]] = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.5).step(),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value.flip(0) for name, value in model.state_dict().items()}
    ),
    "merged": lambda model: merge(model.model.layers[1].self_attn.v_proj.weight),
    "one number": lambda model: model.model.norm.weight.data[3].mul_(-3),
    "other storage": lambda model: setattr(
        model.model.layers[0].mlp.up_proj, "weight", torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 2)
    ),
    "float32": lambda model: model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_laid_out_anew(packed, change: str) -> None:
    decode(packed)
    laid_out = transformers_bridge._KNOWN[packed]
    decode(packed)
    assert transformers_bridge._KNOWN[packed] is laid_out
    for parameter in packed.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    CHANGES[change](packed)
    packed.zero_grad()
    assert torch.equal(decode(packed), decode(copy.deepcopy(packed)))
    assert transformers_bridge._KNOWN[packed] is not laid_out


def test_float16_is_computed_in_float32_and_takes_16_bits(packed) -> None:
    half = packed.half()
    assert torch.equal(decode(half), decode(copy.deepcopy(half).float()))
    decoder = transformers_bridge._KNOWN[half].methods.model
    assert decoder.dtype == torch.float32
    assert held_bytes(decoder)[0] < 1.4 * held_bytes(half)[0]  # padding, biases and tables are float32


def test_a_packed_module_keeps_its_mode_and_its_gradients(packed) -> None:
    usual = decode(packed.eval())
    assert torch.equal(decode(packed.train()), usual)
    assert packed.training
    assert all(parameter.requires_grad for parameter in packed.parameters())
    packed(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    assert packed.model.norm.weight.grad is not None


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_packed_module_gives_the_text_of_its_checkpoint(tmp_path: Path, library, is_tied: bool) -> None:
    model = make_module(is_tied=is_tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    engine = vivace.load(tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12], [3, 4, 5, 6, 7, 8]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    call = {"attention_mask": (ids != 0).long(), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    found = model.generate(ids, **call, custom_generate=vivace.custom_generate, method="plain", pad_token_id=0)
    expected = [r.token_ids for r in engine.generate(prompts, max_new_tokens=24, method="plain", ignore_eos=True)]
    assert found[:, width:].tolist() == [list(tokens) for tokens in expected]


def test_what_can_be_shared_is_shared_and_the_rest_is_told_once(packed, caplog) -> None:
    decode(packed), decode(packed)
    told = [record.message for record in caplog.records if record.name == "vivace.transformers_bridge"]
    assert len(told) == 1
    assert "beside its own" in told[0]
    decoder = transformers_bridge._KNOWN[packed].methods.model
    assert decoder.backend.span is not None
    assert decoder.embedding.data_ptr() == packed.model.embed_tokens.weight.data_ptr()
    assert decoder.final_norm.weight.data_ptr() == packed.model.norm.weight.data_ptr()
    matrices = sum(p.nbytes for n, p in packed.named_parameters() if p.dim() == 2 and "embed" not in n)
    assert held_bytes(packed, decoder)[1] <= matrices + 16_384  # padding to whole tiles, and tables of rotations


def test_nothing_is_kept_of_a_module_that_is_gone(model, library) -> None:
    known = transformers_bridge._KNOWN
    gc.collect()
    before = len(known)
    first, second = (copy.deepcopy(model).to(torch.bfloat16) for _ in range(2))
    decode(first), decode(second)
    assert len(known) == before + 2
    decoder = weakref.ref(known[first].methods.model)
    del first
    gc.collect()
    assert decoder() is None
    assert len(known) == before + 1
    decode(second)


def test_a_module_that_is_not_packed_says_why_once(packed, caplog, monkeypatch) -> None:
    absent = KernelChoice("torch", "the native kernels are not built", None)
    monkeypatch.setattr(transformers_bridge, "choose", lambda *_, **__: absent)
    decode(packed), decode(packed), decode(packed, kernels="torch")
    told = [record.message for record in caplog.records if record.name == "vivace.transformers_bridge"]
    assert told == ["the module runs on PyTorch's kernels: the native kernels are not built"]
    held = transformers_bridge._KNOWN[packed].methods.model
    assert {p.data_ptr() for p in held.parameters()} <= {p.data_ptr() for p in packed.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_criteria_end_each_row_where_transformers_ends_it(model, ragged, dtype: torch.dtype) -> None:
    module = copy.deepcopy(model).to(dtype)
    call = {**ragged, "max_new_tokens": 24, "do_sample": False}
    plain = module.generate(**call, custom_generate=vivace.custom_generate, method="plain")[:, 9:]
    ends = [int(plain[0, 5]), int(plain[2, 2])]

    class AfterFour(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), ids.shape[1] >= 9 + 4)

    for more in ({"eos_token_id": ends}, {"stopping_criteria": StoppingCriteriaList([AfterFour()])}):
        found = module.generate(**call, **more, custom_generate=vivace.custom_generate, method="plain")[:, 9:]
        for row, whole in zip(found.tolist(), plain.tolist(), strict=True):
            stops = [at + 1 for at, token in enumerate(whole) if token in ends] if "eos_token_id" in more else [4]
            stop = min(stops, default=24)
            assert row == (whole[:stop] + [0] * 24)[: found.shape[1]]


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


class _Heard(BaseStreamer):
    """Keeps the blocks that it is given."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.blocks.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_new_tokens_go_into_a_stream_as_they_come(model, ragged, method: str) -> None:
    ids, heard = ragged["input_ids"][-1:], _Heard()
    mask = torch.ones_like(ids)
    asked = {"max_new_tokens": 12, "do_sample": False, "custom_generate": vivace.custom_generate, "method": method}
    found = model.generate(ids, attention_mask=mask, stream=heard, **asked)[0].tolist()
    assert heard.blocks[0] == ids[0].tolist()
    assert [token for block in heard.blocks for token in block] == found
    assert len(heard.blocks) > 2, "not all at once"
    assert heard.has_ended
    with pytest.raises(UnsupportedError, match="stream takes the tokens of one row, and there are 3; leave it out"):
        model.generate(**ragged, stream=heard, **asked)


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


@pytest.mark.parametrize(
    "asked",
    [
        {"output_scores": True},
        {"do_sample": True, "num_beams": 2},
        {"output_attentions": True},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"use_mtp": True},
    ],
    ids=str,
)
def test_what_we_do_not_do_is_refused(model, ragged, asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(asked))):
        model.generate(
            **ragged,
            max_new_tokens=4,
            return_dict_in_generate=True,
            custom_generate=vivace.custom_generate,
            **asked,
        )


@pytest.mark.parametrize("settings", [{"method": "lookup"}, {"num_beams": 2}], ids=str)
def test_allowed_tokens_may_depend_on_the_row(model, ragged, settings: dict[str, Any]) -> None:
    asked = {
        **ragged,
        "max_new_tokens": 6,
        "do_sample": False,
        "prefix_allowed_tokens_fn": lambda row, ids: [10 * row + 10, 10 * row + 11 + int(ids[-1]) % 5],
    }
    usual = model.generate(**asked, **{name: value for name, value in settings.items() if name != "method"})
    assert torch.equal(model.generate(**asked, **settings, custom_generate=vivace.custom_generate), usual)


def test_padding_behind_a_prompt_is_refused(model) -> None:
    ids, mask = torch.tensor([[21, 22, 0, 0], [1, 2, 3, 4]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    with pytest.raises(UnsupportedError, match="pad prompts on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, custom_generate=vivace.custom_generate)


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


BEAMS = [
    {"num_beams": 4, "eos_token_id": END},
    {
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 2.0,
        "early_stopping": True,
        "eos_token_id": [END, 8],
    },
    {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.4, "early_stopping": "never"},
    {
        "num_beams": 4,
        "min_new_tokens": 6,
        "eos_token_id": END,
        "suppress_tokens": [3, 4, 5],
        "forced_eos_token_id": END,
    },
]


@pytest.mark.parametrize("settings", BEAMS, ids=str)
def test_beams_are_those_of_generate(model, ragged, settings: dict[str, Any]) -> None:
    asked = {**ragged, "max_new_tokens": 12, "do_sample": False, **settings}
    scored = {"return_dict_in_generate": True, "output_scores": True}
    usual = model.generate(**asked, **scored)
    ours = model.generate(**asked, **scored, custom_generate=vivace.custom_generate)
    assert torch.equal(ours.sequences, usual.sequences)
    assert torch.allclose(ours.sequences_scores, usual.sequences_scores, atol=1e-5)
    assert torch.equal(model.generate(**asked, custom_generate=vivace.custom_generate), usual.sequences)


def test_beams_stop_where_criteria_say(model, ragged) -> None:
    class Even(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 9 == 0

    asked = {**ragged, "max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    asked["stopping_criteria"] = StoppingCriteriaList([Even()])
    usual = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=vivace.custom_generate), usual)


def test_a_method_that_drafts_has_no_beams(model, ragged) -> None:
    with pytest.raises(UnsupportedError, match="method lookup drafts for one text"):
        model.generate(**ragged, num_beams=2, do_sample=False, custom_generate=vivace.custom_generate, method="lookup")


def test_long_prompts_are_pruned_as_they_are_by_an_engine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, context=512, layers=4)
    module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(1, 200, (2, 90), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    way: dict[str, Any] = {"prefill": "lazy", "keep": "1:0.3", "min_prompt": 70}
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "custom_generate": vivace.custom_generate}
    out = module.generate(ids, attention_mask=mask, **settings, **way, return_dict_in_generate=True)
    assert [stats.prefill for stats in out.speculation] == ["full", "lazy"], "the first one is short"
    assert out.speculation[1].prompt_kept == [[1, 27]]
    engine = vivace.load(folder, dtype="float32")
    wanted = engine.generate(ids[1].tolist(), max_new_tokens=12, do_sample=False, **way)[0].token_ids
    assert tuple(out.sequences[1, 90:].tolist()[: len(wanted)]) == wanted
    back = module.generate(
        ids, attention_mask=mask, **settings, **way, decode_keep="same", return_dict_in_generate=True
    )
    assert sum(map(sum, back.speculation[1].came_back)) > 0
    with pytest.raises(UnsupportedError, match="method lookup cannot draft where prefill lazy prunes in decoding too"):
        module.generate(ids, attention_mask=mask, **settings, **way, decode_keep=0.5, method="lookup")
    with pytest.raises(ConfigError, match="did you mean 'lazy'"):
        module.generate(ids, attention_mask=mask, **settings, prefill="lasy")


def test_arguments_of_a_forward_pass_that_would_change_the_text_are_refused(model, ragged) -> None:
    ids, mask = ragged["input_ids"], ragged["attention_mask"]
    theirs = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ours: dict[str, Any] = {"custom_generate": vivace.custom_generate, "do_sample": False, "max_new_tokens": 4}
    same = model.generate(ids, attention_mask=mask, position_ids=positions, **ours)
    assert same.tolist() == theirs.tolist()
    embedded = model.get_input_embeddings()(ids)
    read = model(ids[:, :2], use_cache=True).past_key_values
    for name, value in {
        "position_ids": 2 * positions,
        "inputs_embeds": embedded,
        "past_key_values": read,
    }.items():
        with pytest.raises(UnsupportedError, match=f"does not take {name}"):
            model.generate(ids, attention_mask=mask, **{name: value}, **ours)
    with pytest.raises(UnsupportedError, match="does not take inputs_embeds"):
        model.generate(inputs_embeds=embedded, attention_mask=mask, **ours)


def test_a_module_with_forward_hooks_is_refused(ragged) -> None:
    module = make_module()
    handle = module.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0 has forward hooks"):
        module.generate(**ragged, custom_generate=vivace.custom_generate, max_new_tokens=2)
    handle.remove()
    assert module.generate(**ragged, custom_generate=vivace.custom_generate, max_new_tokens=2).shape[1] > 2


def test_a_search_that_finds_fewer_texts_than_asked_for_has_all_rows(model, ragged) -> None:
    asked: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 1, "forced_eos_token_id": 0}
    asked |= {"do_sample": False, "eos_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    theirs = model.generate(**ragged, **asked)
    ours = model.generate(**ragged, custom_generate=vivace.custom_generate, **asked)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert torch.allclose(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4)


def test_what_generate_would_not_look_at_is_not_refused(model, ragged) -> None:
    """Without top_k a penalty of contrastive search changes nothing there."""
    asked: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 1, "max_new_tokens": 4, "do_sample": False}
    theirs = model.generate(**ragged, **asked)
    assert torch.equal(model.generate(**ragged, custom_generate=vivace.custom_generate, **asked), theirs)


@pytest.mark.parametrize("settings", [{"method": "plain"}, {"method": "lookup"}], ids=str)
def test_a_watermark_remembers_each_row_by_itself(model, ragged, settings: dict[str, Any]) -> None:
    for count in (1, 3):
        rows = {name: value[-count:] for name, value in ragged.items()}
        mark = SynthIDTextWatermarkingConfig(keys=[5, 9, 13], ngram_len=2, context_history_size=8)
        asked = {**rows, "max_new_tokens": 24, "do_sample": False, "watermarking_config": mark}
        ours = model.generate(**asked, custom_generate=vivace.custom_generate, **settings)
        assert torch.equal(ours, model.generate(**asked))

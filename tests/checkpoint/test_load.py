"""Loading is strict, in place, and says in one line what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.parity.families import CONFIGS, make, randomise
from vivace.checkpoint.load import choose_dtype, load_config, load_decoder
from vivace.checkpoint.save import save_decoder
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.core.step import Step
from vivace.errors import CheckpointError, ConfigError, CorruptError, MismatchError, NotFoundError, UnsupportedError

WEIGHTS = "model.safetensors"
Saved = Callable[[str], Path]


def logits(decoder: Decoder) -> Tensor:
    step = Step.dense(1, 12)
    with torch.inference_mode():
        return decoder.head(decoder.run(decoder.embed(torch.arange(1, 13), step), step))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def reconfigure(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def refusal(folder: Path, kind: type[CheckpointError | ConfigError]) -> str:
    with pytest.raises(kind) as caught:
        load_decoder(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_tensors_are_listed(llama: Path) -> None:
    rewrite(llama, lambda t: [t.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(3)])
    message = refusal(llama, MismatchError)
    assert all(f"model.layers.{i}.mlp.up_proj.weight" in message for i in range(3))


def test_unexpected_tensors_are_listed(llama: Path) -> None:
    rewrite(llama, lambda t: t.update(strange=torch.zeros(2)))
    assert "unexpected: strange" in refusal(llama, MismatchError)


def test_wrong_shapes_are_named(llama: Path) -> None:
    reconfigure(llama, intermediate_size=52)
    assert "mlp.gate_proj.weight is [48, 32], expected [52, 32]" in refusal(llama, MismatchError)


def test_a_layer_more_than_configured(llama: Path) -> None:
    reconfigure(llama, num_hidden_layers=2)
    assert "unexpected: model.layers.2." in refusal(llama, MismatchError)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_weights(llama: Path, kept: int) -> None:
    whole = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(whole[:kept])
    assert "truncated or not safetensors" in refusal(llama, CorruptError)


def test_half_a_config(llama: Path) -> None:
    (llama / "config.json").write_text('{"model_type": "lla')
    assert "config.json is not readable JSON" in refusal(llama, CorruptError)
    (llama / "config.json").write_text("[1]")
    assert "not an object" in refusal(llama, CorruptError)


def test_missing_things(llama: Path, tmp_path: Path) -> None:
    assert "there is no checkpoint directory" in refusal(tmp_path / "nowhere", NotFoundError)
    assert "is a file" in refusal(llama / WEIGHTS, NotFoundError)
    (llama / WEIGHTS).rename(llama / "pytorch_model.bin")
    assert "pickled .bin weights only" in refusal(llama, NotFoundError)
    (llama / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in refusal(llama, NotFoundError)
    (llama / "config.json").unlink()
    assert "has no config.json" in refusal(llama, NotFoundError)


def test_shards(llama: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make("llama").save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_decoder(sharded)), logits(load_decoder(llama)))
    index = json.loads((sharded / f"{WEIGHTS}.index.json").read_text())
    first = index["weight_map"]["model.embed_tokens.weight"]
    (sharded / first).rename(tmp_path / "gone")
    assert first in refusal(sharded, NotFoundError)
    (tmp_path / "gone").rename(sharded / first)
    index["weight_map"]["model.extra"] = first
    (sharded / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "model.extra" in refusal(sharded, CorruptError)
    shutil.copyfile(llama / WEIGHTS, sharded / WEIGHTS)  # what was written later counts, as in transformers
    assert torch.equal(logits(load_decoder(sharded)), logits(load_decoder(llama)))


def test_a_tied_head_may_be_stored_if_it_agrees(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("mistral"), folder := tmp_path / "tied")
    before = logits(load_decoder(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load_decoder(folder)), before)
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder, MismatchError)


def test_buffers_of_old_versions_are_ignored(llama: Path, saved: Saved, tmp_path: Path) -> None:
    """They are not read: the logits are those of the checkpoint without them."""
    shutil.copytree(saved("gpt2"), gpt2 := tmp_path / "gpt2")
    buffers = {
        llama: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        gpt2: {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)},
    }
    for folder, extra in buffers.items():
        before = logits(load_decoder(folder))
        rewrite(folder, lambda t, extra=extra: t.update(extra))
        assert torch.equal(logits(load_decoder(folder)), before)


@pytest.mark.parametrize(
    ("family", "root", "other"), [("gpt2", "transformer.", ""), ("opt", "model.decoder.", "decoder.")]
)
def test_other_roots(saved: Saved, tmp_path: Path, family: str, root: str, other: str) -> None:
    shutil.copytree(saved(family), folder := tmp_path / family)
    before = logits(load_decoder(folder))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(root)]:
            tensors[other + name.removeprefix(root)] = tensors.pop(name)

    rewrite(folder, rename)
    assert torch.equal(logits(load_decoder(folder)), before)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_experts_stored_as_one_stack(saved: Saved, tmp_path: Path, family: str) -> None:
    """As transformers holds them in memory, beside one by one as it saves them."""
    shutil.copytree(saved(family), folder := tmp_path / family)
    before = logits(load_decoder(folder))
    model = make(family)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / WEIGHTS)
    assert torch.equal(logits(load_decoder(folder)), before)


def test_one_expert_more_than_configured(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("mixtral"), folder := tmp_path / "mixtral")
    tensors = {name: p.detach().clone() for name, p in make("mixtral").named_parameters()}
    stack = "model.layers.0.mlp.experts.down_proj"
    tensors[stack] = torch.cat((tensors[stack], tensors[stack][:1]))
    save_file(tensors, folder / WEIGHTS)
    assert f"{stack} is [5, 32, 48], expected [4, 32, 48]" in refusal(folder, MismatchError)


def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text = {**CONFIGS["gemma3_text"][1], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, image_token_index=90
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomise(whole, 0, embedding=0.03)
    whole.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    with torch.inference_mode():
        expected = whole(input_ids=torch.arange(1, 13)[None]).logits[0]
    torch.testing.assert_close(logits(decoder), expected, atol=1e-4, rtol=0)
    with pytest.raises(UnsupportedError, match="multimodal checkpoint cannot be saved"):
        save_decoder(decoder, tmp_path / "out", json.loads((tmp_path / "config.json").read_text()))


class NoFeedForward(DenseParts):
    """Feed-forwards whose weights are somewhere else."""

    def feed_forward(self, layer: int) -> nn.Module:
        return nn.Identity()


def test_other_parts_get_what_they_hold(llama: Path) -> None:
    decoder = load_decoder(llama, parts=NoFeedForward(load_config(llama)))
    assert not any("feed_forward" in name for name, _ in decoder.named_parameters())
    assert torch.equal(decoder.layers[2].o.weight, load_decoder(llama).layers[2].o.weight)


def test_weights_stay_in_the_file(llama: Path) -> None:
    """What is stored as we use it is a view of the map; only fused matrices are copied."""
    decoder = load_decoder(llama)
    mapped = _mapped(llama / WEIGHTS)
    inside = {name for name, p in decoder.named_parameters() if any(a <= p.data_ptr() < b for a, b in mapped)}
    fused = {name for name, _ in decoder.named_parameters() if ".qkv." in name or ".up." in name}
    assert inside == {name for name, _ in decoder.named_parameters()} - fused
    assert not any(p.requires_grad for p in decoder.parameters())


def _mapped(file: Path) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]  # type: ignore[misc]


def test_dtypes(llama: Path) -> None:
    assert load_decoder(llama).dtype == torch.float32
    small = load_decoder(llama, "bfloat16")
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert load_decoder(llama, torch.bfloat16).dtype == torch.bfloat16
    reconfigure(llama, dtype="bfloat16")
    assert load_decoder(llama).dtype == torch.bfloat16
    cpu = torch.device("cpu")
    assert choose_dtype("auto", "float16", cpu) == torch.float32
    assert choose_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16
    assert choose_dtype("float16", "float32", cpu) == torch.float16
    for wrong in ("int8", "half4", "nn"):
        with pytest.raises(ConfigError, match="use auto, float32 or bfloat16"):
            load_decoder(llama, wrong)


def test_config_alone(llama: Path) -> None:
    assert load_config(llama) == load_decoder(llama).config
    reconfigure(llama, model_type="bert")
    with pytest.raises(UnsupportedError, match="'bert' is not supported"):
        load_decoder(llama)

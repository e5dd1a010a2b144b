"""A GGUF file holds the checkpoint's numbers, under the names and in the order that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.checkpoint.gguf_reader import Gguf, read_gguf, read_values
from tests.tiny_checkpoints import SPECIAL, TEMPLATE, make_checkpoint
from vivace.checkpoint.files import open_tensors, resolve
from vivace.checkpoint.gguf.blocks import KINDS, encode
from vivace.checkpoint.gguf.file import Entry, write_gguf
from vivace.checkpoint.gguf.written import write_checkpoint
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.errors import CheckpointError, ConfigError, MismatchError, NotFoundError, UnsupportedError

HEADS = {"q": 4, "k": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_llama(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        **{
            **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
            **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_theta": 5e5},
            **changes,
        }  # type: ignore[arg-type]
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder)
    return folder


def neighbours(values: Tensor, heads: int) -> Tensor:
    """Rows of a head as llama.cpp wants them: component i beside i + D/2. Said with indices, not with shapes."""
    width = len(values) // heads
    order = [
        head * width + half * (width // 2) + pair
        for head in range(heads)
        for pair in range(width // 2)
        for half in (0, 1)
    ]
    return values[order]


def expected(folder: Path) -> dict[str, Tensor]:
    """GGUF name -> the checkpoint's values."""
    stored = open_tensors(folder)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
        **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
        **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    }
    names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}" for i in (0, 1) for theirs, ours in parts.items()}
    found = {}
    for name in stored.names:
        stem, leaf = name.rsplit(".", 1)
        values = stored.tensor(name)
        if stem[-6:-5] in HEADS and stem.endswith("_proj"):
            values = neighbours(values, HEADS[stem[-6]])
        found[f"{names[stem]}.{leaf}"] = values
    return found


def test_bf16_values_are_the_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "model")
    written = write_checkpoint(source, tmp_path / "m.gguf", tokenizer=False)
    found, wanted = read_gguf(tmp_path / "m.gguf"), expected(source)
    assert (written.kind, written.num_bytes) == ("bf16", (tmp_path / "m.gguf").stat().st_size)
    assert set(found.tensors) == set(wanted)
    assert len(wanted) == 3 + 2 * 16
    for name, values in wanted.items():
        assert found.tensors[name].shape == values.shape, name
        assert torch.equal(found.tensors[name].float(), values.float()), name
        assert found.kinds[name] == (30 if values.dim() == 2 else 0), name
    assert found.keys["general.file_type"] == 32
    assert found.keys["tokenizer.ggml.model"] == "none"
    assert {key.removeprefix("llama."): value for key, value in found.keys.items() if key.startswith("llama.")} == {
        **{"vocab_size": 96, "context_length": 128, "embedding_length": 64, "block_count": 2},
        **{"feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2},
        **{"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 5e5,
    }


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_other_kinds_hold_the_same_model(tmp_path: Path, kind: str) -> None:
    source = make_llama(tmp_path / "model", torch.float32)
    assert write_checkpoint(source, tmp_path / "a.gguf", tokenizer=False).kind == "f32"
    write_checkpoint(source, tmp_path / "m.gguf", kind, tokenizer=False)
    found = read_gguf(tmp_path / "m.gguf")
    for name, values in expected(source).items():
        error = (found.tensors[name] - values).abs().max()
        assert error <= (0 if kind == "f32" or values.dim() == 1 else {"f16": 2e-3, "q8_0": 0.02, "q4_0": 0.4}[kind])


def test_a_file_is_not_written_over_itself(tmp_path: Path) -> None:
    write_checkpoint(make_llama(tmp_path / "model"), tmp_path / "m.gguf", tokenizer=False)
    (tmp_path / "same.gguf").symlink_to(tmp_path / "m.gguf")
    before = (tmp_path / "m.gguf").read_bytes()
    for out in ("m.gguf", "same.gguf"):
        with pytest.raises(ConfigError, match=rf"{out} is the model itself; name another file"):
            write_checkpoint(tmp_path / "m.gguf", tmp_path / out, "q8_0", tokenizer=False)
    assert (tmp_path / "m.gguf").read_bytes() == before


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64),
    st.sampled_from([("q8_0", 127), ("q4_0", 8)]),
    st.sampled_from([1.0, 1e-3, 1e-9, 1e-43, 0.0]),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("error")
def test_no_value_of_a_block_is_further_away_than_its_scale_allows(
    values: list[float], kind: tuple[str, int], factor: float
) -> None:
    name, steps = kind
    x = torch.tensor(values) * factor
    stored = encode(x[None], KINDS[name])
    assert stored.nbytes == KINDS[name].num_bytes((1, 64))
    for block, raw in zip(x.view(2, 32), stored.reshape(2, -1), strict=True):
        found = read_values(raw.tobytes(), (32,), KINDS[name].code)
        scale = float(block.abs().max()) / steps
        half = 2.0**-11 * float(block.abs().max()) + 2.0**-24 * steps  # the scale itself is a float16
        # q8_0 rounds to the nearest; q4_0 has no code at +8, so the end opposite the largest value is cut
        allowed = scale / 2 if name == "q8_0" else scale
        assert float((found - block).abs().max()) <= allowed + 2 * half


def test_blocks_round_as_the_format_says() -> None:
    row = torch.zeros(1, 32)
    row[0, :5] = torch.tensor([-127.0, 0.5, -0.5, 1.5, 126.4])
    assert encode(row, KINDS["q8_0"]).view("int8")[2:8].tolist() == [-127, 1, -1, 2, 126, 0]
    row = torch.arange(32.0)[None] / 2 - 8
    raw = encode(row, KINDS["q4_0"])
    assert raw[:2].view("float16").item() == 1.0
    assert [raw[2] & 15, raw[2 + 1] & 15, raw[2 + 15] & 15, raw[2] >> 4, raw[2 + 15] >> 4] == [0, 1, 8, 8, 15]
    assert not encode(torch.zeros(1, 32), KINDS["q8_0"]).any()
    with pytest.raises(UnsupportedError, match=r"1e\+05 is beyond float16's 65504"):
        encode(torch.full((1, 32), 1e5), KINDS["f16"])


def test_stretched_rotary_positions_become_divisors(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    source = make_llama(tmp_path / "linear", rope_parameters=linear)
    write_checkpoint(source, tmp_path / "m.gguf", tokenizer=False)
    assert torch.allclose(read_gguf(tmp_path / "m.gguf").tensors["rope_freqs.weight"], torch.full((8,), 4.0))
    llama3 = {
        **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    source = make_llama(tmp_path / "llama3", rope_parameters=llama3)
    write_checkpoint(source, tmp_path / "m.gguf", tokenizer=False)
    divisors = read_gguf(tmp_path / "m.gguf").tensors["rope_freqs.weight"]
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedError, match="rope_type yarn cannot be written as GGUF"):
        write_checkpoint(make_llama(tmp_path / "yarn", rope_parameters=yarn), tmp_path / "m.gguf")


def test_a_byte_level_tokenizer_is_written(folder: Path, tmp_path: Path) -> None:
    written = write_checkpoint(folder, tmp_path / "m.gguf")
    keys = read_gguf(tmp_path / "m.gguf").keys
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert written.splits_text_alike
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert {piece: index for index, piece in enumerate(keys["tokenizer.ggml.tokens"])} == model["vocab"]
    assert keys["tokenizer.ggml.merges"][0] == " ".join(model["merges"][0])
    assert keys["tokenizer.ggml.token_type"] == [3] * len(SPECIAL) + [1] * (len(model["vocab"]) - len(SPECIAL))
    assert keys["tokenizer.ggml.eos_token_id"] == 0
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.chat_template"] == TEMPLATE


def test_every_token_that_ends_a_text_is_written(folder: Path, tmp_path: Path) -> None:
    source = _copied(folder, tmp_path)
    for ends in ([0, 2], [2, 0, 1]):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        write_checkpoint(source, tmp_path / "m.gguf")
        assert list(load_tokenizer(resolve(tmp_path / "m.gguf")).eos_ids) == ends
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2, 3]}))
    with pytest.raises(UnsupportedError, match="4 tokens end a text of this model, and a GGUF file names 3"):
        write_checkpoint(source, tmp_path / "m.gguf")


def test_an_unknown_split_is_said_and_unused_ids_are_filled(folder: Path, tmp_path: Path) -> None:
    source = _copied(folder, tmp_path)
    found = json.loads((source / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    last = max(found["model"]["vocab"].items(), key=lambda pair: pair[1])[0]
    index = found["model"]["vocab"].pop(last)
    found["model"]["merges"] = [merge for merge in found["model"]["merges"] if "".join(merge) != last]
    (source / "tokenizer.json").write_text(json.dumps(found))
    assert not write_checkpoint(source, tmp_path / "m.gguf").splits_text_alike
    keys = read_gguf(tmp_path / "m.gguf").keys
    assert keys["tokenizer.ggml.pre"] == "default"
    assert keys["tokenizer.ggml.tokens"][index] == f"[unused{index}]"
    assert keys["tokenizer.ggml.token_type"][index] == 5


def test_a_sentencepiece_tokenizer_is_written(folder: Path, tmp_path: Path) -> None:
    source = _copied(folder, tmp_path)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    model = {
        **{"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
        **{"vocab": {word: index for index, word in enumerate(words)}, "merges": [["a", "b"], ["▁", "ab"]]},
    }
    added = [{"id": i, "content": words[i], "special": True} for i in range(3)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}
    found = {"version": "1.0", "model": model, "added_tokens": [one | flags for one in added]}
    (source / "tokenizer.json").write_text(json.dumps(found | {"normalizer": normalizer}))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<unk>"})
    )
    assert write_checkpoint(source, tmp_path / "m.gguf").splits_text_alike
    keys = read_gguf(tmp_path / "m.gguf").keys
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    scores = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    assert scores["ab"] > scores["▁ab"] > scores["a"]
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.bos_token_id"] == 1


def _copied(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_what_cannot_be_written_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_text("precious")
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedError, match="only llama checkpoints can be written as GGUF; this one is gpt2"):
        write_checkpoint(tmp_path / "gpt2", out)
    with pytest.raises(ConfigError, match="'q4_1' is not written here; did you mean 'q4_0'"):
        write_checkpoint(folder, out, "q4_1")
    odd = make_llama(tmp_path / "odd", hidden_size=48, attention_bias=False)
    with pytest.raises(UnsupportedError, match="rows of 48 values cannot be q8_0, whose blocks have 32"):
        write_checkpoint(odd, out, "q8_0", tokenizer=False)
    with pytest.raises(NotFoundError, match=r"no tokenizer\.json"):
        write_checkpoint(odd, out)
    with pytest.raises(UnsupportedError, match="activation gelu"):
        write_checkpoint(make_llama(tmp_path / "gelu", hidden_act="gelu"), out)
    small = _copied(folder, tmp_path)
    make_llama(small)
    with pytest.raises(MismatchError, match="ids up to 319, the model knows 96 tokens"):
        write_checkpoint(small, out)
    assert out.read_text() == "precious"
    assert list(tmp_path.glob(".m.gguf*")) == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def full() -> Tensor:
        raise OSError(28, "No space left on device")

    entry = Entry("x", (2, 2), KINDS["f32"], full)
    with pytest.raises(CheckpointError, match="could not be written, and is as it was: No space left"):
        write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, [entry])
    assert list(tmp_path.iterdir()) == []


def test_large_tensors_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.checkpoint.gguf.file._PART", 64)
    values = torch.randn(7, 32)
    entries = [Entry(name, (7, 32), KINDS[name], lambda: values) for name in ("f32", "q8_0", "bf16")]
    write_gguf(tmp_path / "m.gguf", {"a.flag": True, "a.list": [1.5, 2.5], "a.number": 7}, entries)
    found: Gguf = read_gguf(tmp_path / "m.gguf")
    assert found.keys == {"a.flag": True, "a.list": [1.5, 2.5], "a.number": 7}
    assert torch.equal(found.tensors["f32"], values)
    assert torch.equal(found.tensors["bf16"], values.bfloat16())
    assert torch.allclose(found.tensors["q8_0"], values, atol=0.03)


def test_what_a_tokenizer_adds_or_normalizes_is_written_or_said(folder: Path, tmp_path: Path) -> None:
    """An end token has a key of its own; another token in front, or lower case, has none."""
    source = _copied(folder, tmp_path)
    found = json.loads((source / "tokenizer.json").read_text())
    end, other = (next(piece for piece, at in found["model"]["vocab"].items() if at == index) for index in (0, 2))

    def written(changed: dict[str, Any]) -> tuple[bool, list[int], list[int]]:
        (source / "tokenizer.json").write_text(json.dumps(found | changed))
        alike = write_checkpoint(source, tmp_path / "m.gguf").splits_text_alike
        ids = [list(load_tokenizer(place).encode("Hello")) for place in (source, resolve(tmp_path / "m.gguf"))]
        return alike, *ids

    def frame(*parts: dict[str, Any]) -> dict[str, Any]:
        known = {piece: {"id": piece, "ids": [at], "tokens": [piece]} for piece, at in ((end, 0), (other, 2))}
        pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
        single = list(parts)
        made = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
        return {"post_processor": made}

    text = {"Sequence": {"id": "A", "type_id": 0}}
    alike, theirs, ours = written(frame(text, {"SpecialToken": {"id": end, "type_id": 0}}))
    assert alike
    assert ours == theirs
    assert ours[-1] == 0
    alike, theirs, ours = written(frame({"SpecialToken": {"id": other, "type_id": 0}}, text))
    assert not alike
    assert theirs[0] == 2
    assert not written({"normalizer": {"type": "Lowercase"}})[0]
    assert written({})[0]

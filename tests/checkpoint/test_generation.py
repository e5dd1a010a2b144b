"""What a checkpoint's own generation settings mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from vivace.checkpoint.generation import load_eos_ids, load_generation_defaults
from vivace.errors import ConfigError, CorruptError, UnsupportedError


def settings(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_defaults_are_those_that_are_set(llama: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    harmless = {"num_beam_groups": 1, "bos_token_id": 1, "pad_token_id": 0, "transformers_version": "5", "min_p": None}
    assert load_generation_defaults(settings(llama, **asked, **harmless, max_new_tokens=77)) == asked | {
        "max_new_tokens": 77
    }


def test_what_transformers_saves_asks_for_nothing(llama: Path) -> None:
    assert load_generation_defaults(llama) == {}
    (llama / "generation_config.json").unlink()
    assert load_generation_defaults(llama) == {}


@pytest.mark.parametrize(("name", "value"), [("num_beam_groups", 4), ("penalty_alpha", 0.6), ("suppress_tokens", [3])])
def test_what_we_do_not_do_is_refused(llama: Path, name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"asks for {name} = "):
        load_generation_defaults(settings(llama, **{name: value}))


def test_searches_are_set_up_by_the_checkpoint(llama: Path) -> None:
    asked = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "min_length": 56, "num_return_sequences": 2}
    assert load_generation_defaults(settings(llama, **asked, forced_eos_token_id=[2])) == asked | {
        "forced_eos_token_id": 2
    }
    with pytest.raises(UnsupportedError, match=r"forced_eos_token_id = \[2, 3\]; name one token there"):
        load_generation_defaults(settings(llama, forced_eos_token_id=[2, 3]))


def test_half_a_file(llama: Path) -> None:
    (llama / "generation_config.json").write_text("{")
    with pytest.raises(CorruptError, match=r"generation_config\.json is not readable JSON"):
        load_generation_defaults(llama)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("temperature", "hot", "float"),
        ("temperature", True, "float"),
        ("top_p", [0.9], "float"),
        ("top_k", 3.5, "int"),
        ("max_new_tokens", True, "int"),
        ("do_sample", "yes", "bool"),
        ("do_sample", 1, "bool"),
        ("stop_strings", 7, "str"),
        ("forced_eos_token_id", "a", "int"),
        ("decoder_start_token_id", "a", "int"),
        ("forced_bos_token_id", 1.5, "int"),
        ("bad_words_ids", [3], "tuple"),
        ("early_stopping", "always", "one of True, False, never"),
    ],
)
def test_settings_of_another_type(llama: Path, name: str, value: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {name}(\[0\])? must be {kind}, found "):
        load_generation_defaults(settings(llama, **{name: value}))


def test_settings_in_a_config_of_another_type(llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True, "num_beams": "many"}))
    with pytest.raises(ConfigError, match=r"^config\.json: num_beams must be int, found 'many'$"):
        load_generation_defaults(llama)


@pytest.mark.parametrize("value", ["a", 1.5, {"id": 3}, True, [1, "a"]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_that_are_no_ids(llama: Path, file: str, value: object) -> None:
    settings(llama)
    read = json.loads((llama / file).read_text())
    (llama / file).write_text(json.dumps(read | {"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"^{file}: eos_token_id must be int, found "):
        load_eos_ids(llama)


def test_end_of_text(llama: Path) -> None:
    assert load_eos_ids(settings(llama, eos_token_id=[5, 6])) == (5, 6)
    assert load_eos_ids(settings(llama, eos_token_id=7)) == (7,)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert load_eos_ids(settings(llama)) == (9,)
    (llama / "generation_config.json").unlink()
    assert load_eos_ids(llama) == (9,)


IN_CONFIG = {
    **{"do_sample": True, "repetition_penalty": 1.3, "num_return_sequences": 2, "num_beams": 3, "min_length": 4},
    **{"length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
    **{"max_length": 40, "temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.1, "forced_eos_token_id": 0},
}


def in_config(folder: Path, **values: object) -> Path:
    """Leave a checkpoint without ``generation_config.json``, with settings in ``config.json``."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def theirs_of(folder: Path) -> Any:
    """Return the settings that a model of transformers gets when there is no ``generation_config.json``."""
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


@pytest.mark.parametrize("has_encoder", [False, True])
def test_without_the_file_config_says_what_transformers_reads_there(llama: Path, has_encoder: bool) -> None:
    theirs = theirs_of(in_config(llama, **IN_CONFIG, epsilon_cutoff=None))
    found = load_generation_defaults(in_config(llama, is_encoder_decoder=has_encoder))
    assert set(found) == set(IN_CONFIG)
    for name, value in found.items():
        assert json.loads(json.dumps(value)) == getattr(theirs, name) == IN_CONFIG[name], name
    assert load_generation_defaults(settings(llama)) == {}, "the file counts, even if nothing stands in it"


def test_an_inner_part_of_config_says_what_the_outer_leaves_open(llama: Path) -> None:
    inner = {"repetition_penalty": 1.5, "num_beams": 2}
    in_config(llama, num_beams=4, repetition_penalty=None, text_config=inner, is_encoder_decoder=False)
    theirs = theirs_of(llama)
    assert (theirs.num_beams, theirs.repetition_penalty) == (4, 1.5)
    assert load_generation_defaults(llama) == {"num_beams": 4, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("name", "value"), [("suppress_tokens", [3]), ("encoder_no_repeat_ngram_size", 2), ("typical_p", 0.5)]
)
@pytest.mark.parametrize("has_encoder", [False, True])
def test_what_we_do_not_do_is_refused_in_config_too(llama: Path, name: str, value: object, has_encoder: bool) -> None:
    with pytest.raises(UnsupportedError, match=rf"^config\.json asks for {name} = "):
        load_generation_defaults(in_config(llama, is_encoder_decoder=has_encoder, **{name: value}))

"""The model in three bits that comes with the package: its size, and that it answers as the stored one does."""

from __future__ import annotations

import json
from math import prod

import vivace
from vivace.checkpoint.files import WEIGHTS, resolve
from vivace.checkpoint.load import load_config
from vivace.cli.evaluate import Worn
from vivace.evaluate.fidelity import read_answer
from vivace.prompts import packaged_prompts

NAME = "vivace-14m-3bit"


def test_it_takes_three_bits_and_a_tenth_a_weight_of_the_layers() -> None:
    file = resolve(NAME) / WEIGHTS
    assert file.stat().st_size <= 6.5e6
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    sizes = {name: entry for name, entry in header.items() if name.startswith("model.layers.") and "norm" not in name}
    num_bytes = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in sizes.values())
    config = load_config(resolve(NAME))
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    num_weights = config.num_layers * config.width * (heads + 3 * config.ffn_width)
    assert num_weights == 13_369_344
    assert 2 < 8 * num_bytes / num_weights <= 3.1
    assert not any(prod(entry["shape"]) == 256 * 512 and entry["dtype"] == "BF16" for entry in sizes.values())


def test_it_nearly_always_goes_on_as_the_stored_model_does() -> None:
    """Of the tokens of the stored model's answers; a rounded model is another model, and some answers differ."""
    few, stored = vivace.load(NAME), vivace.load("vivace-14m")
    hits: list[bool] = []
    for prompt in (*packaged_prompts("e2e")[:6], *packaged_prompts("sql")[:6]):
        asked = stored.tokenizer.encode_prompt(prompt.request)
        answer = stored.generate(asked, method="plain", max_new_tokens=64, do_sample=False)[0].token_ids
        hits += read_answer(Worn(few, None), asked, answer)[1]
        plain, guessed = (
            few.generate(asked, method=method, max_new_tokens=64, do_sample=False)[0] for method in ("plain", "lookup")
        )
        assert plain.token_ids == guessed.token_ids
        assert plain.finish_reason == "stop"
    assert sum(hits) / len(hits) >= 0.95

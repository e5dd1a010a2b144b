"""The mixture that comes with the package: its size, and that it says from a store what it says in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vivace
from vivace.checkpoint.files import resolve
from vivace.prompts import packaged_prompts
from vivace.storage.convert import write_store

NAME = "vivace-5m-moe"
SETTINGS: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False}


def test_it_is_smaller_than_twelve_mebibytes() -> None:
    assert sum(path.stat().st_size for path in resolve(NAME).rglob("*") if path.is_file()) <= 12 << 20


def test_from_a_store_it_says_what_it_says_in_memory(tmp_path: Path) -> None:
    prompts = [prompt.request for prompt in packaged_prompts("e2e")[:4]]
    whole = vivace.load(NAME)
    expected = whole.generate(prompts, method="plain", **SETTINGS)
    assert all(result.finish_reason == "stop" for result in expected)
    assert all(
        result.text.startswith(prompt.split("[")[1].split("]")[0])
        for prompt, result in zip(map(str, prompts), expected, strict=True)
    )
    store = write_store(resolve(NAME), tmp_path / "store").folder
    part = vivace.load(store, memory="6MiB", adapters=resolve(NAME) / "adapters" / "foresight")
    assert part.storage is not None
    cache = part.storage.experts
    assert cache is not None
    assert cache.num_slots < 64
    for prompt, known in zip(prompts, expected, strict=True):
        for method in ("plain", "foresight"):
            assert part.generate(prompt, method=method, **SETTINGS)[0].text == known.text

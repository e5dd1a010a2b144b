"""Prompts on disk: a later process answers as if it had read them, or reads them; nothing else can happen."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.every_method import make_model
from tests.serve.conftest import local
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.cache import KVCache
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.serve.config import ServeConfig

KERNELS = ("torch", "auto")
LONG = [1 + 7 * place % 300 for place in range(300)]
FIELDS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": True, "method": "plain"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), context=512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def opened(model: Path, folder: Path | None, **choices: Any) -> Engine:
    return vivace.load(model, **{"dtype": "bfloat16", "prompt_cache": folder, **choices})


def answer(engine: Engine, prompt: list[int] | str = LONG, **options: Any) -> tuple[object, int]:
    """What can be seen of an answer, and how many of its prompt's tokens were not read."""
    [result] = engine.generate(prompt, **FIELDS | options)
    if engine.prompt_cache is not None:
        engine.prompt_cache.flush()
    return (result.token_ids, result.logprobs), result.stats.num_cached_tokens


def entries(cache: KVCache, length: int) -> list[torch.Tensor]:
    layers = range(len(cache.store.specs))
    return [part for layer in layers for part in cache.span(layer, 0, 0, length)]


def read(engine: Engine, prompt: list[int]) -> KVCache:
    """A session's cache once a prompt is read."""
    session = Session(engine.model, num_slots=1, capacity=500)
    session.admit(engine.request(prompt, Options.of({**FIELDS, "max_new_tokens": 40})))
    while not session.cache.lengths[0]:
        session.step()
    while session.cache.lengths[0] < len(prompt) - 1:
        session.step()
    return session.cache


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv", ["same", "int8"])
def test_a_prompt_is_there_after_a_restart(model: Path, folder: Path, kernels: str, kv: str) -> None:
    """A prompt that goes on differently behind 270 tokens has what is common: chunks, or rows."""
    choices = {"kernels": kernels, "kv": kv}
    other = [*LONG[:270], *LONG[:20]]
    fresh = opened(model, None, **choices)
    wanted, wanted_other = answer(fresh)[0], answer(fresh, other)[0]
    assert answer(opened(model, folder, **choices)) == (wanted, 0)
    again = opened(model, folder, **choices)
    assert answer(again) == (wanted, len(LONG) - 1)
    is_by_row = again.model.backend.rows_up_to > 512
    assert answer(opened(model, folder, **choices), other) == (wanted_other, 270 if is_by_row else 256)


@pytest.mark.parametrize("kernels", KERNELS)
def test_entries_are_those_that_reading_gives(model: Path, folder: Path, kernels: str) -> None:
    engine = opened(model, folder, kernels=kernels)
    wanted = entries(read(engine, LONG), len(LONG) - 1)
    assert engine.prompt_cache is not None
    engine.prompt_cache.flush()
    later = opened(model, folder, kernels=kernels)
    found = entries(read(later, LONG), len(LONG) - 1)
    assert later.prompt_cache is not None
    assert later.prompt_cache.num_hits == len(LONG) - 1
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


@pytest.mark.parametrize("method", ["eagle", "multirate", "draft", "lookup", "dynamic"])
def test_methods_know_of_the_prompt_what_they_would_know(tmp_path: Path, method: str) -> None:
    """Residuals are stored with entries, so guesses are the same too."""
    made = make_model(tmp_path, method)
    counts, texts = [], []
    for cache in (None, tmp_path / "prompts", tmp_path / "prompts"):
        engine = vivace.load(made, prompt_cache=cache)
        [result] = engine.generate(LONG[:150], **FIELDS | {"method": method})
        texts.append(result.token_ids)
        counts.append((result.stats.num_draft_tokens, result.stats.accepted_per_position))
        if engine.prompt_cache is not None:
            engine.prompt_cache.flush()
    assert texts[0] == texts[1] == texts[2]
    assert counts[0] == counts[1] == counts[2]
    assert result.stats.num_cached_tokens == 149


def test_windows_that_passed_a_stretch_are_kept_to(model: Path, tmp_path: Path, folder: Path) -> None:
    """What a window has passed is not on disk, so a text that would read it is read anew."""
    windowed = make_checkpoint(tmp_path / "windowed", context=512)
    config = json.loads((windowed / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20}
    (windowed / "config.json").write_text(json.dumps(config))
    longer = [*LONG, *LONG[:150]]
    prompts = {"all": longer, "more": [*longer, 9, 8, 7], "less": LONG[:80], "branch": [*LONG[:230], *LONG[:30]]}
    wanted = {name: answer(opened(windowed, None), prompt)[0] for name, prompt in prompts.items()}
    assert answer(opened(windowed, folder), longer)[0] == wanted["all"]
    known = {}
    for name, prompt in prompts.items():
        later = opened(windowed, folder, prompt_cache_ro=True)
        found, known[name] = answer(later, prompt)
        assert found == wanted[name], name
    assert known["all"] == 449
    assert known["more"] >= 384
    assert known["less"] == known["branch"] == 0


def test_behind_memory_the_disk_adds_what_is_missing(model: Path, folder: Path) -> None:
    wanted = answer(opened(model, None))[0]
    answer(opened(model, folder))
    engine = opened(model, folder, prefix_cache="64MiB")
    answer(engine, LONG[:100])
    assert answer(engine) == (wanted, 299)
    assert engine.prompt_cache is not None
    hits = engine.prompt_cache.num_hits
    assert answer(engine) == (wanted, 299)
    assert engine.prompt_cache.num_hits == hits, "now the memory has it all"


def test_a_conversation_goes_on_after_a_restart(native: None, model: Path, folder: Path) -> None:
    """Answers are kept too where they have the bits of a prompt."""
    engine = opened(model, folder)
    first = LONG[:200]
    [said_before] = engine.generate(first, **FIELDS | {"max_new_tokens": 30})
    assert engine.prompt_cache is not None
    engine.prompt_cache.flush()
    turn = [*first, *said_before.token_ids, 5, 6, 7]
    assert answer(opened(model, folder), turn) == (answer(opened(model, None), turn)[0], 229)
    assert not [p for p in folder.iterdir() if p.suffix == ".block" and _tokens(p) in (7, 36)], "shorter ones are gone"


def _tokens(path: Path) -> int:
    content = path.read_bytes()
    length = int.from_bytes(content[8:12], "little")
    return len(json.loads(content[16 : 16 + length])["tokens"])


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(place: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return spoil


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "other bytes": lambda path: path.write_bytes(b"what" * 99),
    "a bit of the header": flip(40),
    "a bit of the header's length": flip(10),
    "a bit of an entry": flip(-100),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_open", [False, True])
def test_damaged_blocks_are_read_anew(
    model: Path, folder: Path, damage: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the cache was opened before the damage or after it."""
    wanted = answer(opened(model, folder))[0]
    later = opened(model, folder) if is_open else None
    for path in folder.glob("*.block"):
        DAMAGE[damage](path)
    later = opened(model, folder) if later is None else later
    assert answer(later) == (wanted, 0)
    assert len(said(caplog)) == 1, "one line"
    assert answer(opened(model, folder)) == (wanted, 299), "and are written anew"


def test_a_text_whose_middle_is_damaged_is_taken_up_to_there(
    native: None, model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = answer(opened(model, folder))[0]
    later = opened(model, folder)
    [third] = [path for path in folder.glob("*.block") if f'"first":{128}' in path.read_bytes()[:4000].decode("latin1")]
    flip(-5)(third)
    assert answer(later) == (wanted, 128)
    assert "checksum is wrong" in said(caplog)[0]


def test_another_version_is_left_alone(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from vivace.storage.prompt_cache import block_file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_file, "FORMAT", 2)
        patch.setattr(block_file.BlockHeader.__init__, "__defaults__", (2,))
        wanted = answer(opened(model, folder))[0]
    before = sorted(folder.glob("*.block"))
    later = opened(model, folder)
    assert "it has version 2, this is 1" in said(caplog)[0]
    assert answer(later)[0] == wanted
    assert set(before) <= set(folder.glob("*.block"))


@pytest.mark.parametrize(
    ("choices", "what"),
    [({"dtype": "float32"}, "dtype"), ({"kv": "int8"}, "kv"), ({"weights": "int8"}, "weights"), ({}, "model")],
)
def test_blocks_of_another_model_are_not_used(
    model: Path, tmp_path: Path, folder: Path, choices: dict[str, str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer(opened(model, folder, kernels="torch"))
    other = model if choices else make_checkpoint(tmp_path / "other", context=512, seed=3)
    wanted = answer(opened(other, None, kernels="torch", **choices))[0]
    assert answer(opened(other, folder, kernels="torch", **choices)) == (wanted, 0)
    assert f"blocks are not used: of another {what}" in said(caplog)[0]
    assert answer(opened(other, folder, kernels="torch", **choices)) == (wanted, 299), "both have room in a folder"


def test_other_kernels_find_nothing(native: None, model: Path, folder: Path) -> None:
    answer(opened(model, folder, kernels="torch"))
    assert answer(opened(model, folder))[1] == 0


# Who sees what, and how much there may be


def test_over_http_keys_and_salts_are_apart(model: Path, folder: Path) -> None:
    def ask(engine: Engine, key: str, **fields: Any) -> int:
        with local(engine, ServeConfig(method="plain", api_keys=("one", "two"), prefix_cache_bytes=0)) as server:
            body = {"prompt": LONG[:130], "max_tokens": 2, **fields}
            reply = server.http().post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            usage = reply.json()["usage"]
            assert engine.prompt_cache is not None
            engine.prompt_cache.flush()
            return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    assert ask(opened(model, folder), "one") == 0
    assert ask(opened(model, folder), "two") == 0
    assert ask(opened(model, folder), "one", cache_salt="a") == 0
    assert ask(opened(model, folder), "one") == 129


def test_memory_that_waits_for_the_disk_is_free_when_it_is_needed(model: Path, folder: Path) -> None:
    free = opened(model, None)
    limit = free.memory.held_bytes + 8 * free.model.blocks.block_bytes
    wanted = [answer(free, [n, *LONG])[0] for n in range(1, 6)]
    engine = opened(model, folder, memory=limit)
    results = [engine.generate([n, *LONG], **FIELDS)[0] for n in range(1, 6)]
    assert [(result.token_ids, result.logprobs) for result in results] == wanted
    assert engine.prompt_cache is not None
    engine.prompt_cache.flush()
    assert engine.prompt_cache.evictable_bytes == 0
    assert engine.memory.taken_bytes == 0
    assert engine.memory.most_taken_bytes <= 8 * free.model.blocks.block_bytes


def test_a_folder_stays_below_its_limit(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text that is larger than the folder leaves its beginning there."""
    small = opened(model, folder, kernels="torch", prompt_cache_bytes=1 << 18)
    wanted = answer(opened(model, None, kernels="torch"))[0]
    assert answer(small)[0] == wanted
    for first in range(1, 8):
        answer(small, [first, *LONG])
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1 << 18
    tiny = opened(model, folder.with_name("tiny"), kernels="torch", prompt_cache_bytes=55_000)
    assert answer(tiny)[0] == wanted
    assert "hold 256 tokens of a text and no more" in said(caplog)[0]

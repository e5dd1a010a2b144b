"""LoRAs of a wide twin say what they say beside the small model."""

from __future__ import annotations

from pathlib import Path

import pytest

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.widen import widen_checkpoint, without_twin
from vivace.errors import ConfigError, MismatchError
from vivace.methods.composition import twins

ASKED = {"max_new_tokens": 32, "do_sample": False, "ignore_eos": True}
PROMPTS = ["aka", "bob", "the quick fox"]


def test_a_lora_and_its_drafts_are_widened(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", layers=4)
    lora = make_lora(tmp_path / "sql", base, says_base=False)
    make_adapter(lora / "drafting" / "multirate", base)
    assert without_twin(base, twins(), {"sql": lora}) == ()
    wide = widen_checkpoint(base, tmp_path / "wide", 2, twins(), loras={"sql": lora})
    folders = {base: lora, wide: wide / "loras" / "sql"}
    engines = [vivace.load(path, dtype="float32", adapters={"sql": own}) for path, own in folders.items()]
    for method in ("plain", "multirate"):
        small, large = (engine.generate(PROMPTS, adapter="sql", method=method, **ASKED) for engine in engines)
        for one, twin in zip(small, large, strict=True):
            assert one.token_ids == twin.token_ids
            assert one.stats.accepted_per_position == twin.stats.accepted_per_position
    assert sum(map(sum, (answer.stats.accepted_per_position for answer in small))) > 0
    plain = engines[1].generate(PROMPTS, method="plain", **ASKED)
    assert plain[0].token_ids != large[0].token_ids


def test_a_recovery_adapter_is_widened_with_its_model(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    make_lora(base / "adapters" / "recovery", base)
    wide = widen_checkpoint(base, tmp_path / "wide", 2, twins())
    worn, bare = (
        vivace.load(wide, dtype="float32", recovery=wears).generate("aka", **ASKED)[0].token_ids
        for wears in (True, False)
    )
    assert worn == vivace.load(base, dtype="float32").generate("aka", **ASKED)[0].token_ids != bare


def test_what_is_no_lora_of_the_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    base, other = make_checkpoint(tmp_path / "base"), make_checkpoint(tmp_path / "other", seed=5)
    lora = make_lora(tmp_path / "sql", base)
    for given, asked in (
        ({"sql": base}, pytest.raises(ConfigError, match="is no LoRA; draft weights")),
        ({"a/b": lora}, pytest.raises(ConfigError, match="its folder in the twin, found 'a/b'")),
        ({"sql": make_lora(tmp_path / "strange", other)}, pytest.raises(MismatchError)),
    ):
        with asked:
            widen_checkpoint(base, tmp_path / "wide", 2, twins(), loras=given)
        assert not (tmp_path / "wide").exists()

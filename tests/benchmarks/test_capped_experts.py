"""The benchmark of experts under a control group: its map, its GGUF file, its gains and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.capped_expert_tables import gains_over, tables_of
from benchmarks.capped_experts import MappedExperts, kept_rows, last_row, with_gains
from benchmarks.expert_guesses import load_around
from benchmarks.mixture_gguf import write_mixture
from tests.checkpoint.gguf_reader import read_gguf
from tests.storage.experts.mixtures import answers
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.storage.convert import write_store
from vivace.storage.experts.store import StoredExperts
from vivace.storage.io.readers import READERS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capped")
    return upcycle_checkpoint(make_checkpoint(folder / "dense", layers=3), folder / "moe", num_experts=4, noise=0.5)


def test_a_mapped_store_says_what_the_resident_model_says(mixture: Path, tmp_path: Path) -> None:
    store = write_store(mixture, tmp_path / "store", kernels="torch")
    reader = READERS["buffered"](store.path)
    mapped: Any = MappedExperts(StoredExperts(store, reader))
    found = answers(load_around(store, reader, mapped))
    assert [each.tokens for each in found] == [each.tokens for each in answers(load_decoder(mixture))]


def test_a_mixture_as_gguf_has_each_expert_in_its_place(mixture: Path, tmp_path: Path) -> None:
    write_mixture(mixture, tmp_path / "model.gguf")
    written = read_gguf(tmp_path / "model.gguf")
    keys, tensors = written.keys, written.tensors
    model = load_decoder(mixture)
    moe = model.config.moe
    assert moe is not None
    assert (keys["llama.expert_count"], keys["llama.expert_used_count"]) == (moe.num_experts, moe.top_k)
    named = dict(model.named_parameters())
    for layer in range(model.config.num_layers):
        parts = {stem: tensors[f"blk.{layer}.ffn_{stem}_exps.weight"] for stem in ("gate", "up", "down")}
        for number in range(moe.num_experts):
            name = f"layers.{layer}.feed_forward.experts.{number}"
            gate, up = named[f"{name}.up.weight"].bfloat16().chunk(2)
            down = named[f"{name}.down.weight"].bfloat16()
            for stem, wanted in (("gate", gate), ("up", up), ("down", down)):
                assert torch.equal(parts[stem][number], wanted), (layer, stem)


def row(milliseconds: list[float], loads: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        **{"ms_per_token": sum(milliseconds) / len(milliseconds), "ms_by_answer": milliseconds},
        **{"num_tokens": 100, "device_bytes": 100 << 20, "peak_bytes": 1 << 30, "texts": [[1, 2], [3, 4], [5, 6]]},
    }
    return found if loads is None else found | {"loads_per_token": loads, "compute_ms": 10.0, "simulated_ms": 44.0}


def test_gains_and_bounds_stand_in_the_table(tmp_path: Path) -> None:
    rows = {
        "on_demand": row([100.0, 100.0], 48.0),
        "lru": row([40.0, 60.0], 20.0),
        "ahead": row([25.0, 25.0], 15.0),
        "llama.cpp": row([50.0, 50.0]) | {"texts": [[1], [3, 5], [5, 6]]},
        "accelerate": {"error": "killed for memory"},
    }
    with_gains(rows, load_ms=2.0)
    assert rows["ahead"]["over_lru"] == 2.0
    assert rows["ahead"]["over_lru_range"] == [1.6, 2.4]
    assert rows["ahead"]["bound_over_lru"] == pytest.approx((20 * 2 + 10) / 30)
    report = {
        "provenance": {"cpu": "a processor", "commit": None, "num_threads": 1},
        **{"kernels": "avx512", "num_experts": 384, "expert_bytes": 3_000_000, "share": 0.5, "limit_bytes": 1 << 29},
        **{"store_bytes": 1 << 30, "gb_per_s": 2.0, "answers": 7, "tokens": 48, "rows": rows},
    }
    assert tables_of(tmp_path) == "No run is committed yet."
    (tmp_path / "slow.json").write_text(json.dumps(report))
    few = {name: row | {} for name, row in rows.items() if name in ("lru", "ahead")}
    few["ahead"].pop("over_on_demand")
    (tmp_path / "fast.json").write_text(json.dumps(report | {"gb_per_s": 3.0, "rows": few}))
    text, fast = tables_of(tmp_path).split("holds to 3 GB/s")
    assert "| ahead | 25.0 | 2.00x (1.60 to 2.40) | 1.67x | 4.00x | 44.0 (+76%) |" in text
    assert "| llama.cpp's memory map | 50.0 | 1.00x" in text
    assert "| 2 of 3 |" in text
    assert "killed for memory" in text
    assert "Gains above their own bound: ahead, llama.cpp." not in text
    assert "Gains above their own bound: ahead." in text
    assert "Ahead of time: 2.00x LRU (1.25x was asked for) and 4.00x no cache (2.5x was asked for). It takes" in text
    assert "0.50 of the time of llama.cpp's memory map. Gains" in text
    assert "Ahead of time: 2.00x LRU (1.25x was asked for). Gains above" in fast


def test_gains_are_those_of_answers_that_both_have() -> None:
    lru = row([10.0, 90.0]) | {"texts": [[0], [1] * 11, [2] * 11]}
    cut = row([20.0]) | {"texts": [[0], [1] * 11]}
    assert gains_over(lru, cut) == (0.5, [0.5])
    short = row([20.0, 30.0]) | {"texts": [[0], [1] * 4, [2] * 2]}
    gain, each = gains_over(lru, short)
    assert gain == pytest.approx((3 * 10 + 90) / (3 * 20 + 30))
    assert each == [0.5, 3.0]


def test_a_row_that_is_cut_keeps_its_last_whole_line() -> None:
    assert last_row('{"num_tokens": 3}\n{"num_tokens": 6}\n{"num_tok', "cut") == {"num_tokens": 6}
    assert last_row("", "no whole answer within 5 s") == {"error": "no whole answer within 5 s"}


def test_an_interrupted_run_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    file, settings = tmp_path / "run.json", {"share": 0.5, "tokens": 8}
    assert kept_rows(file, settings)["rows"] == {}
    file.write_text(json.dumps(settings | {"in_memory": {"expert_s": 1.0}, "rows": {"lru": row([1.0, 2.0])}}))
    kept = kept_rows(file, settings)
    assert list(kept["rows"]) == ["lru"]
    assert kept["in_memory"] == {"expert_s": 1.0}
    with pytest.raises(SystemExit, match=r"another tokens: give another --json, or remove it"):
        kept_rows(file, settings | {"tokens": 9})

"""``convert --store``, ``inspect`` and ``generate --memory`` as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.adapters import base_hash
from vivace.errors import ConfigError
from vivace.prompts import Prompt, packaged_prompts, save_prompts
from vivace.storage.convert import write_store
from vivace.storage.neurons.calibration import calibrate
from vivace.storage.neurons.ordering import load_orders
from vivace.storage.store import DATA, open_store


class Cli(Protocol):
    def __call__(self, *words: object, stdin: str = "") -> Any: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), layers=6)
    make_adapter(folder / "adapters" / "multirate", folder)
    return folder


ASK = ("generate", "Describe the weather", "--max-new-tokens", 12, "--kernels", "torch")


@pytest.mark.parametrize("method", ["plain", "lookup", "multirate"])
def test_less_memory_says_the_same(cli: Cli, model: Path, tmp_path: Path, method: str) -> None:
    done = cli("convert", tmp_path / "store", "--store", "--model", model, "--json")
    assert done.json["layout"] == "layers", done.err
    plain = cli(*ASK, "--model", model, "--method", "plain").out
    found = cli(*ASK, "--model", tmp_path / "store", "--method", method, "--memory", "430KiB", "--reader", "buffered")
    assert found.out == plain, found.err
    assert "read a pass, ahead of use" in found.err


def test_what_was_read(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("convert", tmp_path / "store", "--store", "--model", model).status == 0
    stored = ("--model", tmp_path / "store", "--memory", "430KiB")
    facts = cli(*ASK, *stored, "--method", "plain", "--json").json["storage"]
    assert facts["budget_bytes"] == 430 * 1024
    assert facts["planned_bytes"] <= 430 * 1024
    assert facts["bytes_read"] > 12 * facts["bytes_per_pass"] > 0
    assert facts["expected_tokens_per_s"] > 0


def test_too_little(cli: Cli, model: Path, tmp_path: Path) -> None:
    cli("convert", tmp_path / "store", "--store", "--model", model)
    found = cli(*ASK, "--model", tmp_path / "store", "--memory", "100KiB")
    assert found.status == 2
    assert "100.0 KiB of memory are too few for store" in found.err
    found = cli(*ASK, "--model", model, "--memory", "20KiB")
    assert found.status == 2
    assert "the model takes" in found.err
    assert "a store, which runs in less: vivace convert --store" in found.err
    found = cli(*ASK, "--model", model, "--memory", "1GiB")
    assert (found.status, "are left for texts" in found.err) == (0, True)
    found = cli(*ASK, "--model", model, "--reader", "mmap")
    assert (found.status, "is a checkpoint: vivace convert OUT --store" in found.err) == (2, True)
    found = cli(*ASK, "--model", tmp_path / "store", "--memory", "1GB", "--weights", "q4")
    assert (found.status, "keeps its weights" in found.err) == (2, True)
    found = cli(*ASK, "--model", tmp_path / "store", "--dtype", "bfloat16")
    assert (found.status, "convert it with --dtype bfloat16" in found.err) == (2, True)


def test_memory_wherever_a_model_is_opened(cli: Cli, model: Path, tmp_path: Path) -> None:
    cli("convert", tmp_path / "store", "--store", "--model", model)
    stored = ("--model", tmp_path / "store", "--kernels", "torch", "--memory")
    talk = ("chat", "--max-new-tokens", 8, "--method", "plain")
    plain = cli(*talk, "--model", model, "--kernels", "torch", stdin="aka\n").out
    assert cli(*talk, *stored, "430KiB", "--reader", "buffered", stdin="aka\n").out == plain
    measure = ("bench", "decode", "--methods", "plain,lookup", "--limit", 1, "--repeats", 1, "--max-new-tokens", 4)
    report = cli(*measure, *stored, "430KiB", "--reader", "buffered", "--json", "-").json
    assert [run["identical"] for run in report["runs"]] == [True, True]
    assert report["storage"]["reader"] == "buffered"
    whole = cli(*measure, "--model", model, "--kernels", "torch", "--json", "-").json
    assert whole["storage"] is None
    assert report["roofline"]["weight_bytes"] == pytest.approx(whole["roofline"]["weight_bytes"], rel=0.1)
    for words in (talk, measure, ("serve",)):
        found = cli(*words, *stored, "100KiB")
        assert (found.status, "are too few for store" in found.err, "at least" in found.err) == (2, True, True), words
    found = cli(*measure, *stored, "430KiB", "--peers", "transformers")
    assert (found.status, "--peers read checkpoints" in found.err) == (2, True)


def test_thresholds(cli: Cli, model: Path, tmp_path: Path) -> None:
    save_prompts(
        tmp_path / "prompts.jsonl", [Prompt(p.request, ("Some answer.",)) for p in packaged_prompts("e2e")[:20]]
    )
    words = ("convert", tmp_path / "store", "--store", "--model", model, "--layout", "selected")
    done = cli(*words, "--calibrate", tmp_path / "prompts.jsonl", "--active", "0.6", "--json")
    assert done.status == 0, done.err
    assert len(done.json["calibration"]) == 6
    assert all(0.4 < line["active_share"] < 0.8 and line["error"] > 0 for line in done.json["calibration"])
    found = cli(*ASK, "--model", tmp_path / "store", "--memory", "2MiB")
    assert found.status == 0, found.err
    assert "of 64 neurons a layer in memory" in found.err


def test_an_error_is_allowed_instead_of_a_share(cli: Cli, model: Path, tmp_path: Path) -> None:
    save_prompts(tmp_path / "prompts.jsonl", [Prompt(p.request, ("An answer.",)) for p in packaged_prompts("e2e")[:20]])
    words = ("convert", tmp_path / "store", "--store", "--model", model, "--layout", "selected")
    calibrated = (*words, "--calibrate", tmp_path / "prompts.jsonl")
    shares = []
    for error in (0.02, 0.2):
        done = cli(*calibrated, "--error", error, "--json")
        assert done.status == 0, done.err
        assert all(line["error"] < 2 * error for line in done.json["calibration"])
        shares.append([line["active_share"] for line in done.json["calibration"]])
    assert all(less < more for more, less in zip(*shares, strict=True))
    for wrong, reason in (
        ((*words, "--error", "0.1"), "are for --store --calibrate FILE"),
        ((*words, "--ordered"), "are for --store --calibrate FILE"),
        ((*calibrated, "--error", "0.1", "--active", "0.5"), "give one of them"),
        ((*calibrated, "--error", "1.5"), "error is a share"),
        ((*calibrated, "--ordered"), "this model has silu"),
        ((*calibrated[:-3], "neurons", *calibrated[-2:], "--active", "0.5"), "--active is for --layout selected"),
        ((*words[:-1], "layers", "--calibrate", tmp_path / "prompts.jsonl"), "nothing to calibrate"),
    ):
        found = cli(*(tmp_path / "new" if word == tmp_path / "store" else word for word in wrong))
        assert (found.status, reason in found.err) == (2, True), found.err
        assert not (tmp_path / "new").exists()


def test_neurons_in_the_order_of_their_activity(cli: Cli, tmp_path: Path) -> None:
    """Predictors that find every active neuron give the model's own answer, whatever the order."""
    model = make_checkpoint(tmp_path / "relu")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**settings, "hidden_act": "relu"}), encoding="utf-8")
    save_prompts(tmp_path / "prompts.jsonl", [Prompt(p.request, ("An answer.",)) for p in packaged_prompts("e2e")[:20]])
    words = ("convert", tmp_path / "store", "--store", "--model", model, "--layout", "neurons", "--dtype", "float32")
    done = cli(*words, "--calibrate", tmp_path / "prompts.jsonl", "--error", "0", "--ordered", "--json")
    assert done.status == 0, done.err
    assert load_orders(tmp_path / "store") is not None
    assert all(line["error"] == 0 and line["recall"] == 1 for line in done.json["calibration"])


def test_inspect_a_lora(cli: Cli, model: Path, tmp_path: Path) -> None:
    facts = cli("inspect", make_lora(tmp_path / "lora", model, rank=3), "--json").json
    assert (facts["kind"], facts["rank"], facts["more_than_a_lora"]) == ("lora", 3, [])
    assert facts["base_hash"] == base_hash(model)
    assert facts["bytes"] > 0


def test_inspect(cli: Cli, model: Path, tmp_path: Path) -> None:
    cli("convert", tmp_path / "store", "--store", "--model", model)
    facts = cli("inspect", tmp_path / "store", "--verify", "--json").json
    assert (facts["layout"], facts["verified"], facts["bundles"]) == ("layers", True, 13)
    assert "bytes_feed_forward" in cli("inspect", tmp_path / "store").out
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "store", damaged)
    raw = bytearray((damaged / DATA).read_bytes())
    raw[8192] ^= 1
    (damaged / DATA).write_bytes(raw)
    assert cli("inspect", damaged).status == 0
    found = cli("inspect", damaged, "--verify")
    assert (found.status, "has checksum" in found.err) == (1, True)
    (damaged / DATA).write_bytes(raw[:-1])
    found = cli(*ASK, "--model", damaged)
    assert (found.status, "it is truncated" in found.err) == (1, True)
    found = cli("inspect", model, "--verify")
    assert (found.status, "--verify is for a store" in found.err) == (2, True)


def test_flags_of_a_store_without_one(cli: Cli, model: Path, tmp_path: Path) -> None:
    found = cli("convert", tmp_path / "m.gguf", "--model", model, "--layout", "neurons")
    assert (found.status, "are for a store" in found.err) == (2, True)
    found = cli("convert", tmp_path / "store", "--store", "--model", model, "--layout", "neurons")
    assert (found.status, "this one has silu" in found.err) == (2, True)


@pytest.mark.slow
def test_training_within_a_budget(cli: Cli, model: Path, tmp_path: Path) -> None:
    """The adapter that the resident base gives, from a base that is read while it learns."""
    assert cli("convert", tmp_path / "store", "--store", "--model", model, "--kernels", "torch").status == 0
    rows = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
    save_prompts(tmp_path / "rows.jsonl", rows)
    settings = ("adapter.exit_layer=2", "adapter.rank=4", "adapter.bottleneck=8", "held_back=8", "tokens_per_batch=128")
    settings += ("loop.minutes=null", "loop.steps=2", "loop.warmup_steps=1")
    words = ("train", "multirate", "--data", tmp_path / "rows.jsonl", *settings)
    stored = ("--model", tmp_path / "store", "--memory", "430KiB", "--reader", "buffered")
    found = cli(*words, *stored, "--out", tmp_path / "streamed")
    assert found.status == 0, found.err
    assert "read a pass" in found.err
    assert cli(*words, "--model", model, "--out", tmp_path / "resident").status == 0
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("streamed", "resident")]
    assert weights[0] == weights[1]
    found = cli(*words, *stored[:3], "100KiB", "--out", tmp_path / "none")
    assert (found.status, "are too few for store" in found.err) == (2, True)
    assert not (tmp_path / "none").exists()


def test_texts_that_the_model_cannot_read_are_refused_before_a_store_is_written(cli: Cli, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store", layout="selected")
    most, texts = store.config.max_positions, [(5, 6, 7, 8)] * 12
    with pytest.raises(ConfigError, match=f"text 2 has {most + 1} tokens, this model reads {most}"):
        calibrate(tmp_path / "model", store, [texts[0], (5,) * (most + 1), *texts])
    with pytest.raises(ConfigError, match="text 2 has no tokens"):
        calibrate(tmp_path / "model", store, [texts[0], (), *texts])
    (tmp_path / "texts.jsonl").write_text('{"prompt": [5, 99999]}\n' * 12)
    words = ("convert", tmp_path / "store", "--store", "--layout", "selected", "--model", tmp_path / "model")
    outcome = cli(*words, "--calibrate", tmp_path / "texts.jsonl")
    assert outcome.status == 2
    assert "text 1 has token 99999; this model has tokens 0 to" in outcome.err
    assert open_store(tmp_path / "store").identity == store.identity, "what was there is as it was"

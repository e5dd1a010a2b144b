"""Feed-forwards over their active neurons: dense where all are, near where a threshold or a guess leaves some out."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.decode.runs import Result
from tests.parity.families import CONFIGS, make, randomise
from tests.storage.stored import PROMPTS, TOKENS, answers, broken, distance, opened, same
from vivace.checkpoint.load import load_decoder
from vivace.core.cpu.packed import PackedLinear
from vivace.core.model import Decoder
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Emitted, Request
from vivace.decode.session import Session
from vivace.errors import CheckpointError, ConfigError, CorruptError, MismatchError, NotFoundError
from vivace.kernels.native import NativeBody
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.loading import load_stored
from vivace.storage.neurons import ordering, predictors, thresholds
from vivace.storage.neurons.calibration import calibrate
from vivace.storage.neurons.feed_forward import NeuronFeedForward
from vivace.storage.neurons.ordering import chain, find_orders
from vivace.storage.neurons.outputs import NeuronOutputs, feeds_of
from vivace.storage.neurons.predictors import (
    Predictor,
    PredictorConfig,
    save_predictors,
    split_held,
    train_predictors,
)
from vivace.storage.neurons.thresholds import find_thresholds
from vivace.storage.store import Store

WIDTH = 640
"""Neurons of a layer: wide enough that a budget leaves some out."""
TEXTS = [tuple((7 * i * i + 3 * j * (i + 1)) % 97 for j in range(40)) for i in range(40)]


@dataclass(frozen=True)
class Case:
    folder: Path
    resident: Decoder
    plain: list[Result]
    selected: Store


def checkpoint(family: str, folder: Path, **settings: object) -> Path:
    kind, own = CONFIGS[family]
    CONFIGS[f"wide {family}"] = (kind, {**own, **settings})
    try:
        make(f"wide {family}").save_pretrained(folder)
    finally:
        del CONFIGS[f"wide {family}"]
    return folder


@pytest.fixture(scope="module", params=["opt", "relu llama", "llama"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "opt":
        from transformers import OPTConfig, OPTForCausalLM

        config = OPTConfig(
            **{"vocab_size": 97, "hidden_size": 32, "ffn_dim": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4},
            **{"max_position_embeddings": 256, "word_embed_proj_dim": 32, "tie_word_embeddings": False},
        )
        model = OPTForCausalLM(config)
        randomise(model, 0)
        model.save_pretrained(folder / "model")
    else:
        activation = "relu" if request.param == "relu llama" else "silu"
        checkpoint("llama", folder / "model", intermediate_size=WIDTH, hidden_act=activation)
    resident = load_decoder(folder / "model", dtype="float32")
    store = write_store(folder / "model", folder / "selected", layout="selected", dtype="float32")
    return Case(folder, resident, answers(resident), store)


@pytest.mark.parametrize("share", [None, 0.9])
@pytest.mark.parametrize("window", [1, 4])
def test_threshold_zero_is_dense(case: Case, share: float | None, window: int) -> None:
    with opened(case.selected, share, window=window) as (model, storage):
        assert distance(answers(model), case.plain) < 1e-5
        assert storage.neurons is not None
        assert all(cache.num_used == 0 for cache in storage.neurons.caches), "no sequence is left"
        counts = storage.neurons.counts
        if case.resident.config.activation == "relu":
            assert counts.passes > 0
            assert counts.read < counts.active, "windows are of use"


def test_bytes_are_those_of_the_neurons_read(case: Case) -> None:
    with opened(case.selected, 0.9) as (model, storage):
        answers(model)
        neurons = storage.neurons
        assert neurons is not None
        loaded = [storage.store[name] for name in ("resident", *storage.plan.resident)]
        bundle = storage.store["layers.0.neurons"]
        expected = sum(each.num_pages_bytes for each in loaded)
        expected += neurons.counts.read * bundle.stride + neurons.counts.dense * bundle.num_bytes
        assert storage.async_reader.traffic.num_bytes == expected


def test_an_answer_depends_on_no_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(case.folder / "model", case.selected, TEXTS, 0.3)
    try:
        with opened(case.selected, 0.9) as (model, _):
            assert same(answers(model), answers(model))
            assert same(answers(model, PROMPTS[1:]), answers(model)[1:])
        with opened(case.selected, 0.9) as (model, storage):
            found, neurons = answers(model), storage.neurons
            assert neurons is not None
            monkeypatch.setattr(neurons, "is_dense", lambda layer, active: True)  # as beside many other rows
            assert distance(answers(model), found) < 1e-5
    finally:
        (case.selected.folder / thresholds.FILE).unlink()


def test_a_new_store_takes_nothing_over_from_the_old_one(case: Case, tmp_path: Path) -> None:
    """Neither an order of neurons nor what was learnt of the model that lay there before."""
    for name in (ordering.FILE, predictors.FILE, thresholds.FILE):
        (tmp_path / name).write_bytes(b"of another model")
    shutil.copytree(case.selected.folder, tmp_path, dirs_exist_ok=True)
    write_store(case.folder / "model", tmp_path, layout="selected", dtype="float32")
    assert not {ordering.FILE, predictors.FILE, thresholds.FILE} & {path.name for path in tmp_path.iterdir()}


def test_drafts_of_several_rows(case: Case) -> None:
    with opened(case.selected, 0.9) as (model, _):
        found = answers(model, PROMPTS, PromptLookup(LookupConfig()))
        assert distance(found, case.plain) < 1e-5


@pytest.mark.slow_where(lambda case: case == "relu llama")
def test_thresholds_leave_out_what_was_asked_and_cost_more_the_more_they_do(case: Case) -> None:
    errors, logits = [], []
    for active in (1.0, 0.4, 0.2, 0.05):
        reports = calibrate(case.folder / "model", case.selected, TEXTS, active)
        if active == 1.0:
            assert all(report.threshold == 0 for report in reports)  # type: ignore[union-attr]
        for report in reports:
            assert report.active_share == pytest.approx(active, abs=0.1) or active == 1.0
        errors.append([report.error for report in reports])  # type: ignore[union-attr]
        with opened(case.selected, 0.9) as (model, _):
            logits.append(abs(first_logprobs(model) - first_logprobs(case.resident)).mean().item())
    (case.selected.folder / thresholds.FILE).unlink()
    for layer in zip(*errors, strict=True):
        assert list(layer) == sorted(layer)
        assert layer[0] < 1e-6 < layer[-1]
    assert logits[0] < 1e-5 < logits[-1]


def first_logprobs(model: Decoder) -> torch.Tensor:
    """Of one decoding row after a prompt, (V,)."""
    from vivace.core.seams import Draft
    from vivace.decode.forward import ForwardPass

    cache = model.new_cache(1, 128)
    with torch.inference_mode():
        ForwardPass().run(model, Draft.committed_only({0: list(PROMPTS[0][:-1])}), cache, chunk=True)
        cache.commit([0], [list(range(len(PROMPTS[0]) - 1))])
        passed = ForwardPass().run(model, Draft.committed_only({0: [PROMPTS[0][-1]]}), cache)
        return torch.log_softmax(model.head(passed.hidden), -1)[-1]


@pytest.fixture(scope="module")
def neurons(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("neurons")
    checkpoint("llama", folder / "model", intermediate_size=WIDTH, hidden_act="relu")
    return write_store(folder / "model", folder / "store", layout="neurons", dtype="float32")


def test_without_predictors(neurons: Store) -> None:
    (neurons.folder / "predictors.safetensors").unlink(missing_ok=True)
    with pytest.raises(NotFoundError, match="--calibrate"):
        load_stored(neurons.folder, reader="buffered")


def test_a_predictor_that_says_everything_is_dense(neurons: Store) -> None:
    save_predictors(neurons, [Predictor(torch.zeros(1, 32), torch.zeros(WIDTH, 1), torch.ones(WIDTH)) for _ in "abc"])
    plain = answers(load_decoder(neurons.folder.parent / "model", dtype="float32"))
    for share in (None, 0.9):
        with opened(neurons, share) as (model, storage):
            assert distance(answers(model), plain) < 1e-5
            assert storage.neurons is not None
            assert (storage.neurons.counts.passes > 0) == (share is None), "they do not fit, so all are streamed"


def oracle(resident: Decoder) -> list[Predictor]:
    """W_up itself is a predictor of full rank."""
    found = []
    for layer in resident.layers:
        up = layer.feed_forward.up  # type: ignore[union-attr]
        found.append(Predictor(torch.eye(32), up.weight[:WIDTH].clone(), up.bias[:WIDTH] + 1e-4))  # type: ignore[union-attr, index, operator]
    return found


def test_exact_predictors_are_dense_whatever_the_window(neurons: Store) -> None:
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    save_predictors(neurons, oracle(resident))
    reads = []
    for window in (1, 2, 5):
        with opened(neurons, 0.95, window=window) as (model, storage):
            assert distance(answers(model), answers(resident)) < 1e-5
            assert storage.neurons is not None
            reads.append(storage.neurons.counts.read)
    assert reads == sorted(reads, reverse=True)


def test_of_more_than_fits_only_what_is_active_is_read(neurons: Store) -> None:
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    save_predictors(neurons, oracle(resident))
    with opened(neurons, 0.7) as (model, storage):
        assert storage.neurons is not None
        storage.neurons.block = 50
        answers(model, PROMPTS[:1])
        counts = storage.neurons.counts
        dense = counts.dense
        assert distance(answers(model), answers(resident)) < 1e-5
        room = storage.plan.neurons_per_layer
        assert counts.active / counts.passes > room
        assert 0 < counts.excess <= counts.read < counts.active
        assert dense == 3 * 3, "the prompt, in three chunks"


def test_the_order_of_neurons_changes_no_answer(neurons: Store, tmp_path: Path) -> None:
    model = neurons.folder.parent / "model"
    resident = load_decoder(model, dtype="float32")
    orders = find_orders(resident, TEXTS)
    store = write_store(model, tmp_path / "store", layout="neurons", dtype="float32", orders=orders)
    reports = calibrate(model, store, TEXTS, predictors=PredictorConfig(rank=32, recall=1.0, epochs=0))
    with opened(store, 0.9) as (streamed, storage):
        assert distance(answers(streamed), answers(resident)) < 0.05
        assert storage.neurons is not None
        asked = storage.neurons.counts.active / storage.neurons.counts.passes / WIDTH
    assert asked < 1.5 * max(report.predicted_share for report in reports)  # type: ignore[union-attr]
    exact = write_store(model, tmp_path / "exact", layout="selected", dtype="float32", orders=orders)
    with opened(exact, 0.9) as (streamed, _):
        assert distance(answers(streamed), answers(resident)) < 1e-5


def test_what_is_active_together_lies_together() -> None:
    active = torch.rand(200, 8, generator=torch.Generator().manual_seed(0)) > 0.7
    order = chain(active.repeat(1, 3))
    assert sorted(order.tolist()) == list(range(24))
    assert all(len({int(each) % 8 for each in copies}) == 1 for copies in order.split(3))


def test_orders_that_are_none(neurons: Store, tmp_path: Path) -> None:
    orders = [torch.zeros(WIDTH, dtype=torch.int64)] * 3
    with pytest.raises(ConfigError, match="each of 640 neurons once"):
        write_store(neurons.folder.parent / "model", tmp_path / "store", layout="neurons", orders=orders)


def test_trained_predictors_find_what_is_active(neurons: Store) -> None:
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    config = PredictorConfig(rank=8, recall=0.95, epochs=6)
    predictors, reports = train_predictors(resident, TEXTS, config)
    for report in reports:
        assert report.recall >= 0.95
        assert report.active_share < report.predicted_share < 1
        assert report.precision > report.active_share, "better than chance"
    start, untrained = train_predictors(resident, TEXTS, replace(config, epochs=0))
    assert all(a.predicted_share <= b.predicted_share for a, b in zip(reports, untrained, strict=True))
    assert any(a.predicted_share < b.predicted_share for a, b in zip(reports, untrained, strict=True))
    assert len(start) == len(predictors) == 3


def test_sessions_by_turns_answer_as_alone(neurons: Store) -> None:
    """What a predictor misses is computed where it is in memory: not where another session has brought it there."""
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    save_predictors(neurons, train_predictors(resident, TEXTS, PredictorConfig(rank=8, recall=0.6, epochs=1))[0])

    def begun(model: Decoder, prompt: tuple[int, ...]) -> Session:
        session = Session(model, num_slots=1, capacity=TOKENS, chunk=16)
        session.admit(Request(prompt, 8, NoDrafts(), logprobs=True))
        return session

    with opened(neurons, 0.95) as (model, _):
        alone = [list(begun(model, prompt).drain()) for prompt in PROMPTS]
        sessions = [begun(model, prompt) for prompt in PROMPTS]
        found: list[list[Emitted]] = [[] for _ in PROMPTS]
        while not all(session.is_idle for session in sessions):
            for session, emitted in zip(sessions, found, strict=True):
                emitted += session.step()
        again = list(begun(model, PROMPTS[0]).drain())
    for texts in (found, [again]):
        for one, other in zip(texts, alone, strict=False):
            assert [(e.tokens, e.logprobs) for e in one] == [(e.tokens, e.logprobs) for e in other]


def test_predictors_of_every_direction_are_the_layer_itself(neurons: Store) -> None:
    """Where the rank is that of the inputs nothing is asked for that is not active, before any training."""
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    whole = PredictorConfig(rank=resident.config.width, recall=1.0, epochs=0)
    for report in train_predictors(resident, TEXTS, whole)[1]:
        assert report.recall == 1.0
        assert report.predicted_share == pytest.approx(report.active_share, rel=0.02)


def test_predictors_of_another_model(neurons: Store) -> None:
    save_predictors(neurons, [Predictor(torch.zeros(1, 16), torch.zeros(WIDTH, 1), torch.ones(WIDTH)) for _ in "abc"])
    with pytest.raises(MismatchError, match="does not fit layer 0"):
        load_stored(neurons.folder, reader="buffered")


@pytest.mark.parametrize("limit", [0.0, 0.03, 0.1, 0.3])
def test_the_error_of_predictors_is_within_the_limit_and_another_step_beyond(neurons: Store, limit: float) -> None:
    resident = load_decoder(neurons.folder.parent / "model", dtype="float32")
    config = PredictorConfig(rank=8, error=limit, epochs=1)
    predictors, reports = train_predictors(resident, TEXTS, config)
    held = split_held(TEXTS)[1]
    for predictor, report, (feed, (x,)) in zip(predictors, reports, feeds_of(resident, held), strict=True):
        outputs = NeuronOutputs(feed, x)
        active, scores = outputs.gate > 0, predictor.scores(x)
        left_out = active & (scores <= 0)
        assert report.error == pytest.approx(outputs.error(left_out), abs=1e-6)
        assert report.error <= limit
        # a seventh of what is found beyond that is too much
        kept = scores[active & ~left_out].sort().values
        assert outputs.error(active & (scores < kept[len(kept) // 7])) > limit
    if limit == 0:
        assert all(report.recall == 1 for report in reports)


@pytest.mark.slow_where(lambda case, limit: case != "llama" and limit != 0.05)
@pytest.mark.parametrize("limit", [0.0, 0.05, 0.2])
def test_the_error_of_thresholds_is_within_the_limit_where_they_were_found(case: Case, limit: float) -> None:
    reports = find_thresholds(case.resident, TEXTS, error=limit)
    learned = split_held(TEXTS)[0]
    for report, (feed, (x,)) in zip(reports, feeds_of(case.resident, learned), strict=True):
        outputs = NeuronOutputs(feed, x)
        sizes = outputs.gate.abs()
        assert outputs.error(sizes <= report.threshold) <= limit
        assert (
            outputs.error(sizes <= sizes.flatten().sort().values[int((sizes <= report.threshold).sum() * 1.15) + 9])
            > limit
        )
        assert report.error < 1.5 * limit + 1e-6
    if limit == 0:
        assert all(report.threshold == 0 for report in reports)


def test_errors_that_cannot_be(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"found 1"):
        find_thresholds(case.resident, TEXTS, error=1.0)
    with pytest.raises(ConfigError, match=r"found -0\.1"):
        PredictorConfig(error=-0.1)


def test_thresholds_of_another_store(case: Case) -> None:
    (case.selected.folder / thresholds.FILE).write_text(json.dumps({"identity": "0", "thresholds": [0, 0, 0]}))
    with pytest.raises(MismatchError, match="belongs to another store"):
        load_stored(case.selected.folder, reader="buffered")
    (case.selected.folder / thresholds.FILE).unlink()


@pytest.mark.parametrize("found", [None, "abc", [None, 0, 0], ["x", 0, 0], [float("nan"), 0, 0], {"a": 1}])
def test_thresholds_that_are_no_numbers(case: Case, found: object) -> None:
    written = {"identity": case.selected.identity, "thresholds": found}
    (case.selected.folder / thresholds.FILE).write_text(json.dumps(written))
    with pytest.raises(CorruptError, match="a threshold is no number"):
        load_stored(case.selected.folder, reader="buffered")
    (case.selected.folder / thresholds.FILE).unlink()


def test_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found 1\.5"):
        calibrate(case.folder / "model", case.selected, TEXTS, 1.5)
    with pytest.raises(ConfigError, match="9 texts are too few"):
        calibrate(case.folder / "model", case.selected, TEXTS[:9])
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        calibrate(case.folder / "model", write_store(case.folder / "model", tmp_path / "layers"), TEXTS)
    with pytest.raises(ConfigError, match="found 0"):
        PredictorConfig(rank=0)


def test_a_file_cut_while_it_is_used(case: Case, tmp_path: Path) -> None:
    store = write_store(case.folder / "model", tmp_path / "store", layout="selected", dtype="float32")
    whole = store.path.read_bytes()
    with opened(store, 0.9) as (model, _):
        os.truncate(store.path, store["layers.2.neurons"].offset)
        with pytest.raises(CorruptError, match="ends early"):
            answers(model)
        store.path.write_bytes(whole)
        assert distance(answers(model), case.plain) < 1e-5


def test_budgets(case: Case) -> None:
    full = plan_memory(case.selected, None, TOKENS)
    assert full.neurons_per_layer == WIDTH
    half = plan_memory(case.selected, int(full.num_bytes * 0.7), TOKENS)
    assert WIDTH // 32 <= half.neurons_per_layer < WIDTH
    assert half.num_bytes <= full.num_bytes * 0.7


def test_native_kernels_beside_neurons(case: Case, body: NativeBody, tmp_path: Path) -> None:
    store = write_store(case.folder / "model", tmp_path / "store", layout="selected", dtype="bfloat16")
    resident = load_decoder(case.folder / "model", dtype="bfloat16")
    model, storage = load_stored(store.folder, reader="buffered", num_tokens=TOKENS, body=body)
    assert storage.body is body
    assert isinstance(model.layers[0].qkv, PackedLinear)
    found, plain = first_logprobs(model), first_logprobs(resident)
    assert (found - plain).abs().max() < 0.1 * (plain.max() - plain.min())
    assert found.argmax() == plain.argmax()
    storage.close()
    _, unused = load_stored(case.selected.folder, reader="buffered", num_tokens=TOKENS, body=body)
    assert unused.body is None, "float32 is PyTorch's"
    unused.close()


def test_native_kernels_compute_with_neurons(neurons: Store, body: NativeBody, tmp_path: Path) -> None:
    folder = neurons.folder.parent / "model"
    store = write_store(folder, tmp_path / "store", layout="neurons", dtype="bfloat16")
    found = [replace(each, bias=each.bias + 0.05).to(torch.bfloat16) for each in oracle(load_decoder(folder))]
    save_predictors(store, found)
    logprobs = []
    for used in (body, None):
        with opened(store, 0.7, body=used) as (model, storage):
            logprobs.append(first_logprobs(model))
            assert storage.neurons is not None
            assert storage.neurons.body is used
            assert storage.neurons.counts.excess > 0
    assert (logprobs[0] - logprobs[1]).abs().max() < 0.1 * (logprobs[1].max() - logprobs[1].min())
    assert logprobs[0].argmax() == logprobs[1].argmax()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_native_kernels_compute_with_selected_neurons(body: NativeBody, tmp_path: Path, activation: str) -> None:
    """Three rows that select neurons of their own, of which some are in memory and some find no room there."""
    sizes = {"intermediate_size": WIDTH, "hidden_act": activation, "mlp_bias": False}
    model_folder = checkpoint("llama", tmp_path / "model", **sizes)
    store = write_store(model_folder, tmp_path / "store", layout="selected", dtype="bfloat16")
    calibrate(model_folder, store, TEXTS, 0.3)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, store.config.width, generator=draw).bfloat16() for _ in range(4)]
    found = []
    for used in (body, None):
        with opened(store, 0.7, body=used) as (model, storage):
            feed = model.layers[1].feed_forward
            assert isinstance(feed, NeuronFeedForward)
            found.append([feed._some(x, feed._selected(x)) for x in rows])
            assert storage.neurons is not None
            assert storage.neurons.body is used
            assert storage.neurons.counts.excess > 0
            assert storage.neurons.counts.read < storage.neurons.counts.active
    for native, plain in zip(*found, strict=True):
        assert native is not None
        assert plain is not None
        assert (native - plain).abs().max() < 0.02 * plain.abs().max()


def test_a_failed_read_ends_its_sequence_and_the_next_one_reads_again(case: Case, tmp_path: Path) -> None:
    """Neurons that did not come are not taken for those that did."""
    calibrate(case.folder / "model", case.selected, TEXTS, 0.3)
    with opened(case.selected, 0.9) as (model, storage):
        plain = answers(model, PROMPTS[:1])[0]
        session = Session(model, num_slots=1, capacity=TOKENS, chunk=16)
        session.admit(Request(PROMPTS[0], 8, NoDrafts(), logprobs=True))
        with torch.inference_mode():
            begun = [token for _ in range(5) for token in _stepped(session)]
            with broken(storage.reader.reader, tmp_path):
                ended = [emitted for _ in range(3) for emitted in session.step()][-1]
            session.admit(Request(PROMPTS[0], 8, NoDrafts(), logprobs=True))
            tokens = []
            while not session.is_idle:
                tokens += _stepped(session)
    (case.selected.folder / thresholds.FILE).unlink()
    assert isinstance(ended.error, CheckpointError)
    assert "Is a directory" in str(ended.error)
    assert plain.tokens[: len(begun)] == tuple(begun)
    assert tuple(tokens) == plain.tokens


def _stepped(session: Session) -> list[int]:
    return [token for emitted in session.step() for token in emitted.tokens]
